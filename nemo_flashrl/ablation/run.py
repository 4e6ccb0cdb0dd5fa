"""Runs the cells one after another and writes what they came to: ablation.json, ablation.md, ablation.svg."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from nemo_flashrl.ablation.cells import BASELINE, Cell, check_same
from nemo_flashrl.ablation.comparison import (
    LAST_SHARE,
    Cost,
    Indicators,
    compare,
    convergence,
    last_mean,
    slope,
    spikes_of,
)
from nemo_flashrl.ablation.picture import as_markdown, draw
from nemo_flashrl.launch.processes import run_training
from nemo_flashrl.rollout.metrics import unbiased_pass_at_k
from nemo_flashrl.run.jsonl import read_json_lines
from nemo_flashrl.run.record import RunRecord, read_run

NO_ENDS = ("episodes_in_flight",)
HELD_OUT = "evaluation_pass_at_"  # and k
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


def plan_text(cells: Sequence[Cell]) -> str:
    """What would be run."""
    width = max(len(cell.variant) for cell in cells)
    lines = [f"{len(cells)} runs of {cells[0].steps} steps"]
    for cell in cells:
        state = "finished" if is_finished(cell) else "begun" if cell.folder.exists() else "to do"
        lines.append(f"  {cell.variant:<{width}}  seed {cell.seed}  {state:<8}  {cell.folder}")
    return "\n".join(lines)


def run_cells(name: str, cells: Sequence[Cell], processes: int) -> list[Cell]:
    """Run what is not finished; an interrupted run is resumed. Returns the cells that failed."""
    failed = []
    for number, cell in enumerate(cells, 1):
        label = f"[{number}/{len(cells)}] {cell.variant} seed {cell.seed}"
        if is_finished(cell):
            check_same(name, cell)
            print(f"{label}: kept", flush=True)
            continue
        print(label, flush=True)
        cell.folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            run_training(name, cell.overrides, processes, ENVIRONMENT, cell.log)
        except RuntimeError as error:  # the others may still be compared
            print(f"{label} failed: {error}", flush=True)
            failed.append(cell)
    return failed


def write_results(cells: Sequence[Cell], output: Path, measure: str | None, title: str) -> str:
    """The files, of the cells that are finished; returns the table.

    Raises:
        ValueError: no run of the baseline is finished.
    """
    finished = [cell for cell in cells if is_finished(cell)]
    values: dict[str, dict[int, float]] = {}
    costs: dict[str, list[Cost]] = {}
    indicators: dict[str, list[Indicators]] = {}
    results = []
    runs = [read_run(cell.folder) for cell in finished]
    source, passes = pass_at_k(runs)
    # A variant that evaluates and one that does not are compared by what both have.
    compared = measure or (None if all(run.has("evaluation_success") for run in runs) else "success")
    for cell, run, passed in zip(finished, runs, passes, strict=True):
        name, value = outcome(run, compared)
        spent, how = cost(run), replace(indicators_of(run, measure), pass_at_k=passed)
        values.setdefault(cell.variant, {})[cell.seed] = value
        costs.setdefault(cell.variant, []).append(spent)
        indicators.setdefault(cell.variant, []).append(how)
        own = {"variant": cell.variant, "seed": cell.seed, "measure": name, "value": value}
        results.append({**own, "cost": asdict(spent), "indicators": asdict(how)})
    if BASELINE not in values:
        raise ValueError(f"{output}: no run of the baseline is finished, there is nothing to compare against")
    rows = compare(values, BASELINE)
    table = as_markdown(rows, costs, indicators, measure=name, curve=measure or "success", passes=source, title=title)
    (output / "ablation.json").write_text(json.dumps(results, indent=2) + "\n")
    (output / "ablation.md").write_text(table)
    (output / "ablation.svg").write_text(draw(rows, values, name, title))
    return table


def is_finished(cell: Cell) -> bool:
    """Whether its run has done all steps."""
    file = cell.folder / "metrics.jsonl"
    return file.is_file() and any(line.get("step") == cell.steps for line in read_json_lines(file))


def outcome(run: RunRecord, measure: str | None) -> tuple[str, float]:
    """(its name, its mean over the last tenth of the steps that have it): evaluation_success, else success."""
    name = measure or ("evaluation_success" if run.has("evaluation_success") else "success")
    values = run.column(name)
    values = values[np.isfinite(values)]
    if not len(values):
        raise ValueError(f"--measure {name}: {run.folder} has no such metric")
    return name, last_mean(values)


def cost(run: RunRecord) -> Cost:
    """Read from `metrics.jsonl` and `trajectories.jsonl`."""
    # A batch's numbers are in the metrics once for each update on it.
    updates = run.configuration.get("rollout", {}).get("updates_per_batch", 1)
    tokens = sum(row["tokens"] for row in _rows(run))
    ended = sum(v for step in run.steps for k, v in step.items() if k.startswith("episodes_") and k not in NO_ENDS)
    return Cost(
        samples=round(ended / updates),
        tokens=round(tokens / updates),
        seconds=float(np.nansum(run.column("step_seconds"))),
        effective=sum((s.get("effective_samples") or 0.0) * s.get("gate_acceptance", 1.0) for s in run.steps) / updates,
    )


def indicators_of(run: RunRecord, measure: str | None) -> Indicators:
    """All but pass@k, whose k depends on the other runs; the curve is that of `measure`, else of success."""
    reached, deviation, amplitude = convergence(*_curve(run, measure or "success"))
    return Indicators(
        reached, deviation, amplitude, None, slope(*_curve(run, "trajectory_tokens")), *spikes_of(run.steps)
    )


def _curve(run: RunRecord, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) where there is a value; both float64 [points]."""
    steps, values = run.column("step"), run.column(name)
    there = np.isfinite(values)
    return steps[there], values[there]


def pass_at_k(runs: Sequence[RunRecord]) -> tuple[str, list[float | None]]:
    """(of what it is, pass@k of each run), with one k for all.

    Of held-out tasks where all runs evaluate several samples of each, mean over the last tenth of the evaluations; else
    of the groups of the last tenth of the steps, with the largest k that nine tenths of each run's groups allow, the
    others left out. None for a run with one rollout per prompt.
    """
    held_out = [{name for step in run.steps for name in step if name.startswith(HELD_OUT)} for run in runs]
    if common := set.intersection(*held_out) if runs else set():
        name = max(common, key=lambda name: int(name.removeprefix(HELD_OUT)))
        k, curves = name.removeprefix(HELD_OUT), [_curve(run, name)[1] for run in runs]
        return f"pass@{k} (held-out)", [last_mean(values) if len(values) else None for values in curves]
    groups = [_groups(run) for run in runs]
    sizes = [sorted(size for size, _ in own)[len(own) // 10] for own in groups if own]
    k = min((size for size in sizes if size > 1), default=0)
    enough = [[group for group in own if group[0] >= k > 0] for own in groups]
    return (f"pass@{k} (groups)" if k else "pass@k"), [unbiased_pass_at_k(own, k) if own else None for own in enough]


def _groups(run: RunRecord) -> list[tuple[int, int]]:
    """(rollouts, solved ones) of each group of the last tenth of the steps."""
    last = {step["step"] for step in run.steps[-max(1, round(LAST_SHARE * len(run.steps))) :]}
    rollouts: Counter[tuple[int, int]] = Counter()
    solved: Counter[tuple[int, int]] = Counter()
    for row in _rows(run):
        if row["step"] in last and "group" in row:
            rollouts[key := (row["step"], row["group"])] += 1
            solved[key] += bool(row["success"])
    return [(count, solved[key]) for key, count in rollouts.items()]


def _rows(run: RunRecord) -> Iterator[dict[str, Any]]:
    return read_json_lines(run.trajectories) if run.trajectories.is_file() else iter(())
