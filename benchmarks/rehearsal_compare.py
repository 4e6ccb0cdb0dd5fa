"""FlashREINFORCE beside GRPO on the rehearsal, seed against the same seed: a table and a picture of the reward curves.

    python benchmarks/rehearsal_compare.py --runs runs/seeds runs/grpo --picture docs/images/rehearsal_curves.svg

The folders are those of `benchmarks/rehearsal.py`; the first is compared with the second, over seeds that both have.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rehearsal import greedy_success

from nemo_flashrl.ablation.comparison import Interval, t_interval
from nemo_flashrl.ablation.picture import document, line, text
from nemo_flashrl.run.jsonl import read_json_lines
from nemo_flashrl.run.record import RunRecord, read_run

LEARNT = 0.9  # success whose first update is counted
SMOOTHED = 5  # updates, of the curves and of LEARNT
WIDTH, HEIGHT, LEFT, TOP = 640, 300, 50, 50  # pixels of the plot and its margins
SIZE = LEFT + WIDTH + 30, TOP + HEIGHT + 30
COLOURS = ("#1f4e79", "#c25e00")

Row = tuple[str, str, Sequence[Sequence[float]]]  # title, format, of each side a number a seed
Curves = tuple[np.ndarray, np.ndarray]  # x [points], values [seeds, points]


def success(run: RunRecord) -> np.ndarray:
    """Of the training batches, smoothed; [updates - SMOOTHED + 1]."""
    return np.convolve(run.column("success"), np.full(SMOOTHED, 1 / SMOOTHED), "valid")


def learnt_at(run: RunRecord) -> float:
    """The update in which success of the last SMOOTHED updates first reaches LEARNT; NaN if it never does."""
    reached = np.flatnonzero(success(run) >= LEARNT)
    return float(reached[0] + SMOOTHED) if len(reached) else np.nan


def turns_waited(run: RunRecord, key: str) -> float:
    """Turns that the longest trajectory with the same step and `key` has more, mean over trajectories."""
    rows = list(read_json_lines(run.trajectories))
    longest: dict[tuple, int] = {}
    for row in rows:
        place = row["step"], row[key]
        longest[place] = max(longest.get(place, 0), row["turns"])
    return float(np.mean([longest[row["step"], row[key]] - row["turns"] for row in rows]))


def padding_of_one_row_each(run: RunRecord) -> float:
    """Share of padding if a batch were one microbatch with a row as long as its longest trajectory for each."""
    lengths: dict[int, list[int]] = {}
    for row in read_json_lines(run.trajectories):
        lengths.setdefault(row["step"], []).append(row["tokens"])
    return 1 - sum(map(sum, lengths.values())) / sum(len(own) * max(own) for own in lengths.values())


def mean_of(name: str) -> Callable[[RunRecord, Mapping[str, Any]], float]:
    return lambda run, _: float(np.nanmean(run.column(name))) if run.has(name) else 0.0


ROWS: dict[str, tuple[str, Callable[[RunRecord, Mapping[str, Any]], float]]] = {  # title -> (format, of a run)
    "trajectories trained on": (".0f", lambda run, _: sum(1 for _ in read_json_lines(run.trajectories))),
    "with an advantage that is not 0, a batch of 64": (".1f", mean_of("effective_samples")),
    f"update at which success of {SMOOTHED} updates reaches {LEARNT}": (".1f", lambda run, _: learnt_at(run)),
    "success, mean of all updates": (".3f", mean_of("success")),
    "success, last 20 updates": (".3f", lambda run, _: float(run.column("success")[-20:].mean())),
    "greedy success, 256 held-out tasks": (".3f", lambda _, summary: greedy_success(summary)),
    "gradient norm, mean": (".2f", mean_of("grad_norm")),
    "turns that siblings wait for their slowest, a trajectory": (".2f", lambda run, _: turns_waited(run, "group")),
    "turns that the batch waits for its slowest, a trajectory": (".2f", lambda run, _: turns_waited(run, "step")),
    "seconds that siblings wait for their slowest, a trajectory": (".3f", mean_of("group_wait_seconds")),
    "seconds that the trainer waits for a batch": (".2f", mean_of("rollout_seconds")),
    "peak memory of the training process, GiB": (".2f", lambda run, _: float(run.column("memory_peak_gib").max())),
    "processor seconds, warm start and evaluation included": (".0f", lambda _, summary: summary["processor_seconds"]),
    "elapsed seconds": (".0f", lambda _, summary: summary["seconds"]),
}


def shown(values: Interval, form: str) -> str:
    """Of a single value there is no interval, and of NaN nothing to show."""
    if not np.isfinite(values.low):
        return "-" if np.isnan(values.mean) else f"{values.mean:{form}}"
    return f"{values.mean:{form}} [{values.low:{form}}, {values.high:{form}}]"


def table(rows: Iterable[Row], names: Sequence[str]) -> str:
    """Means with 95% intervals over seeds, and of the differences seed by seed."""
    lines = [f"| | {names[0]} | {names[1]} | difference |", "| --- | --- | --- | --- |"]
    for title, form, numbers in rows:
        told = [shown(t_interval(values), form) for values in (*numbers, np.subtract(*numbers))]
        lines.append(f"| {title} | {' | '.join(told)} |")
    return "\n".join(lines)


def panel(curves: Sequence[Curves], names: Sequence[str], title: str, axis: str) -> list[str]:
    """The mean over seeds as a line, from the lowest to the highest seed as a band; elements of an SVG."""
    last = max(x[-1] for x, _ in curves)

    def points(x: np.ndarray, values: np.ndarray) -> str:
        places = LEFT + x / last * WIDTH, TOP + (1 - values) * HEIGHT
        return " ".join(f"{a:.0f},{b:.1f}" for a, b in zip(*places, strict=True))

    parts = [text(LEFT, 20, title, size=15, weight="bold")]
    for share in (0, 0.25, 0.5, 0.75, 1):
        y, x = TOP + (1 - share) * HEIGHT, LEFT + share * WIDTH
        parts += [line(LEFT, y, LEFT + WIDTH, y, "#e0e0e0"), text(LEFT - 6, y + 4, f"{share:g}", anchor="end")]
        parts.append(text(x, TOP + HEIGHT + 18, f"{share * last:.3g}", anchor="middle"))
    parts.append(text(LEFT + WIDTH / 2 + 40, TOP + HEIGHT + 18, axis))
    for number, ((x, values), name, colour) in enumerate(zip(curves, names, COLOURS[: len(names)], strict=True)):
        around = points(np.concatenate([x, x[::-1]]), np.concatenate([values.max(0), values.min(0)[::-1]]))
        parts.append(f'<polygon points="{around}" fill="{colour}" fill-opacity="0.15"/>')
        parts.append(f'<polyline points="{points(x, values.mean(0))}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(text(LEFT + 170 * number, 38, f"— {name}", weight="bold", fill=colour))
    return parts


def smoothed_curves(folders: Iterable[Path]) -> Curves:
    values = np.array([success(read_run(folder)) for folder in folders])
    return np.arange(SMOOTHED, SMOOTHED + values.shape[1]), values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, nargs=2, required=True)
    parser.add_argument("--names", nargs=2, default=["FlashREINFORCE", "GRPO, G=8"])
    parser.add_argument("--picture", type=Path, required=True)
    options = parser.parse_args()
    sides = [{path.parent.name: path.parent for path in sorted(root.glob("*/summary.json"))} for root in options.runs]
    both = sorted(sides[0].keys() & sides[1].keys())
    sides = [{seed: side[seed] for seed in both} for side in sides]
    runs = [[(read_run(f), json.loads((f / "summary.json").read_text())) for f in side.values()] for side in sides]
    rows = ((title, form, [[of(*run) for run in side] for side in runs]) for title, (form, of) in ROWS.items())
    print(table(rows, options.names))
    curves = [smoothed_curves(side.values()) for side in sides]
    title = f"Success, mean of {SMOOTHED} updates: over {len(both)} seeds the mean, the lowest, the highest"
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    options.picture.write_text(document(panel(curves, options.names, title, "update"), *SIZE))


if __name__ == "__main__":
    main()
