"""The comparison as one SVG: a line a variant, its seeds as dots, mean and interval, the baseline's mean dashed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from nemo_flashrl.ablation.comparison import BETTER, INCONCLUSIVE, WORSE, Comparison

PLOT, RIGHT, ROW, TOP, CHARACTER = 520, 40, 34, 56, 7  # pixels
COLOURS = {BETTER: "#1a7f37", WORSE: "#b3261e", INCONCLUSIVE: "#5f6368", "": "#1f4e79"}


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
