"""The comparison as Markdown tables, and as one SVG: a line a variant, its seeds as dots, mean and interval, the
baseline's mean dashed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

from nemo_flashrl.ablation.comparison import (
    BETTER,
    COSTS,
    FEWEST_SEEDS,
    INCONCLUSIVE,
    WORSE,
    Comparison,
    Cost,
    Indicators,
    Interval,
    t_interval,
)

PLOT, RIGHT, ROW, TOP, CHARACTER = 520, 40, 34, 56, 7  # pixels
LABEL = 32  # characters of a variant in a table, so that a line fits 120 columns
COLOURS = {BETTER: "#1a7f37", WORSE: "#b3261e", INCONCLUSIVE: "#5f6368", "": "#1f4e79"}


def as_markdown(
    rows: Sequence[Comparison],
    costs: Mapping[str, Sequence[Cost]],
    indicators: Mapping[str, Sequence[Indicators]],
    *,
    measure: str,
    curve: str,
    passes: str,
    title: str,
) -> str:
    """The tables, and in words what the seeds support.

    Args:
        costs, indicators: of each variant, a seed each.
        curve: whose convergence that is.
        passes: heading of pass@k.
    """
    labels = _labels([row.variant for row in rows])
    level = f"{1 - 0.05 / max(len(rows) - 1, 1):.1%}"
    outcomes, spending, getting_there, output = [], [], [], []
    for label, row in zip(labels, rows, strict=True):
        spent, how = costs[row.variant], indicators[row.variant]
        outcomes.append([label, str(row.seeds), _interval(row.own), _interval(row.difference), row.verdict])
        sums = [_number(_mean(getattr(c, what) for c in spent)) for what in (*COSTS, "effective")]
        each = ", ".join(_number(_mean(c.per_effective(what) for c in spent)) for what in COSTS)
        spending.append([label, *sums, each])
        columns = {name: _over_seeds([getattr(own, name) for own in how]) for name in Indicators.__slots__}
        getting_there.append([label, *(columns[name] for name in ("steps_to_90", "oscillation", "amplitude"))])
        output.append([label, *(columns[name] for name in ("pass_at_k", "tokens_per_step", "spikes"))])
    return "\n".join(
        [
            f"# {title}",
            "",
            *_table(["variant", "seeds", f"{measure} [95%]", f"difference to baseline [{level}]", ""], outcomes),
            "",
            *_supported(rows, measure),
            "",
            *_table(["variant", *COSTS, "effective", "per effective: samples, tokens, seconds"], spending),
            "",
            "Means over seeds. An effective sample is one trained with a nonzero advantage.",
            "",
            *_table(["variant", f"steps to 90% of {curve}", "oscillation after", "amplitude after"], getting_there),
            "",
            *_table(["variant", passes, "tokens/trajectory per step", "steps with a spike"], output),
            "",
            "Means over seeds with 95% intervals; (2 of 3): not defined on the other seed; -: on none.",
            "",
        ]
    )


def _supported(rows: Sequence[Comparison], measure: str) -> list[str]:
    significant = [
        f"{measure} is {row.verdict} with {row.variant}" for row in rows[1:] if row.verdict in (BETTER, WORSE)
    ]
    lines = ["No difference to the baseline is significant over these seeds."]
    if significant:
        lines = [f"Significant over these seeds: {'; '.join(significant)}."]
    if min(row.seeds for row in rows) < FEWEST_SEEDS:
        lines.append(f"With fewer than {FEWEST_SEEDS} seeds no difference is called significant.")
    return lines


def _labels(variants: Sequence[str]) -> list[str]:
    """The ends of long names, where the values are; in full where two would be the same."""
    short = [name if len(name) <= LABEL else f"...{name[3 - LABEL :]}" for name in variants]
    return short if len(set(short)) == len(short) else list(variants)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Markdown whose columns are aligned, for a terminal."""
    cells = [head, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    widths = [max(3, *(len(row[place]) for row in cells)) for place in range(len(head))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in cells]
    lines.insert(1, ["-" * width for width in widths])
    return [f"| {' | '.join(line)} |" for line in lines]


def _over_seeds(values: Sequence[float | None]) -> str:
    defined = [value for value in values if value is not None]
    if not defined:
        return "-"
    return _interval(t_interval(defined)) + (
        f" ({len(defined)} of {len(values)})" if len(defined) < len(values) else ""
    )


def _interval(interval: Interval | None) -> str:
    if interval is None:
        return ""
    if not math.isfinite(interval.low):
        return f"{interval.mean:.3g}"
    return f"{interval.mean:.3g} [{interval.low:.3g}, {interval.high:.3g}]"


def _mean(values: Any) -> float:
    return float(np.mean([*values]))


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "none"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def draw(rows: Sequence[Comparison], values: Mapping[str, Mapping[int, float]], measure: str, title: str) -> str:
    """The picture's text; `values`: variant -> seed -> measure."""
    points = [value for own in values.values() for value in own.values()]
    points += [bound for row in rows for bound in (row.own.low, row.own.high) if math.isfinite(bound)]
    low, high = min(points), max(points)
    labels = {row.variant: f"{row.variant} ({row.verdict})" if row.verdict else row.variant for row in rows}
    left = 28 + CHARACTER * max(map(len, labels.values()))
    width = left + PLOT + RIGHT
    margin = 0.05 * (high - low) or 0.05 * (abs(high) or 1)
    low, high = low - margin, high + margin

    def x(value: float) -> float:
        inside = min(max(value, low), high)
        return left + (inside - low) / (high - low) * PLOT

    bottom = TOP + ROW * len(rows)
    parts = [
        text(16, 24, title, size=15, weight="bold"),
        text(16, 42, f"{measure}: seeds, mean, 95% interval; in brackets the verdict of the paired differences"),
    ]
    for tick in range(5):
        value = low + margin + (high - low - 2 * margin) * tick / 4
        parts.append(line(x(value), TOP, x(value), bottom, "#e0e0e0"))
        parts.append(text(x(value), bottom + 18, f"{value:.3g}", anchor="middle"))
    parts.append(line(x(rows[0].own.mean), TOP, x(rows[0].own.mean), bottom, COLOURS[""], dash="5 4"))
    for number, row in enumerate(rows):
        y, colour = TOP + ROW * (number + 0.5), COLOURS[row.verdict]
        parts.append(text(left - 12, y + 4, labels[row.variant], anchor="end", fill=colour))
        parts.append(line(x(row.own.low), y, x(row.own.high), y, colour, width=2))
        own = values[row.variant].values()
        parts += [f'<circle cx="{x(v):.1f}" cy="{y:.1f}" r="3" fill="none" stroke="{colour}"/>' for v in own]
        parts.append(f'<rect x="{x(row.own.mean) - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" fill="{colour}"/>')
    return document(parts, width, bottom + 30)


def document(parts: Sequence[str], width: int, height: int) -> str:
    """An SVG of these elements on white; sizes in pixels."""
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *parts, "</svg>", ""])


def text(
    x: float, y: float, words: str, *, size: int = 12, weight: str = "normal", anchor: str = "start", fill="#222"
) -> str:
    """`words` from, to or around (x, y), its baseline."""
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{fill}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str, *, width: int = 1, dash: str = "") -> str:
    """From (x1, y1) to (x2, y2)."""
    style = f'stroke="{colour}" stroke-width="{width}"' + (f' stroke-dasharray="{dash}"' if dash else "")
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'
