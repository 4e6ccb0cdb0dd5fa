"""Runs the cells one after another and writes what they came to: ablation.json, ablation.md, ablation.svg."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_flashrl.ablation.cells import BASELINE, Cell, check_same
from nemo_flashrl.ablation.comparison import FEWEST_SEEDS, Comparison, Interval, compare
from nemo_flashrl.ablation.picture import draw
from nemo_flashrl.launch.processes import run_training
from nemo_flashrl.run.jsonl import read_json_lines
from nemo_flashrl.run.record import RunRecord, read_run

NO_ENDS = ("episodes_in_flight",)
LAST_SHARE = 0.1  # of the steps, whose mean is the outcome
COSTS = ("samples", "tokens", "seconds")
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
    results = [read_cell(cell, measure) for cell in cells if is_finished(cell)]
    values: dict[str, dict[int, float]] = {}
    costs: dict[str, list[Cost]] = {}
    for result in results:
        values.setdefault(result["variant"], {})[result["seed"]] = result["value"]
        costs.setdefault(result["variant"], []).append(Cost(**result["cost"]))
    if BASELINE not in values:
        raise ValueError(f"{output}: no run of the baseline is finished, there is nothing to compare against")
    name, rows = results[0]["measure"], compare(values, BASELINE)
    table = as_markdown(rows, costs, name, title)
    (output / "ablation.json").write_text(json.dumps(results, indent=2) + "\n")
    (output / "ablation.md").write_text(table)
    (output / "ablation.svg").write_text(draw(rows, values, name, title))
    return table


def as_markdown(rows: Sequence[Comparison], costs: Mapping[str, Sequence[Cost]], measure: str, title: str) -> str:
    """The table, and in words what the seeds support."""
    compared = len(rows) - 1
    lines = [
        f"# {title}",
        "",
        f"| variant | seeds | {measure} [95%] | difference to the baseline [{1 - 0.05 / max(compared, 1):.1%}] | "
        "| samples | tokens | seconds | effective samples | samples, tokens, seconds per effective sample |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        spent = costs[row.variant]
        each = ", ".join(_number(_mean(c.per_effective(what) for c in spent)) for what in COSTS)
        sums = (_number(_mean(getattr(c, what) for c in spent)) for what in (*COSTS, "effective"))
        cells = [row.variant, row.seeds, _interval(row.own), _interval(row.difference), row.verdict, *sums, each]
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    significant = [row for row in rows[1:] if row.verdict in ("higher", "lower")]
    lines += ["", "Costs are means over seeds. " + ("" if not significant else "Significant over these seeds: ")]
    lines[-1] += "; ".join(f"{measure} is {row.verdict} with {row.variant}" for row in significant)
    lines[-1] += "." if significant else "No difference to the baseline is significant over these seeds."
    if min(row.seeds for row in rows) < FEWEST_SEEDS:
        lines.append(f"With fewer than {FEWEST_SEEDS} seeds no difference is called significant.")
    return "\n".join(lines) + "\n"


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


@dataclass(frozen=True)
class Cost:
    """Of one run."""

    samples: int  # episodes that ended, those that were dropped too
    tokens: int  # of the trajectories in batches, prompts and observations included
    seconds: float  # of all steps
    effective: float  # trajectories trained with an advantage other than 0; a gate's rejections taken off in proportion

    def per_effective(self, what: str) -> float:
        """`samples`, `tokens` or `seconds` of one effective sample; infinite where there was none."""
        return getattr(self, what) / self.effective if self.effective else math.inf


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
    return name, float(values[-max(1, round(LAST_SHARE * len(values))) :].mean())


def cost(run: RunRecord) -> Cost:
    """Read from `metrics.jsonl` and `trajectories.jsonl`."""
    # A batch's numbers are in the metrics once for each update on it.
    updates = run.configuration.get("rollout", {}).get("updates_per_batch", 1)
    tokens = sum(row["tokens"] for row in read_json_lines(run.trajectories))
    ended = sum(v for step in run.steps for k, v in step.items() if k.startswith("episodes_") and k not in NO_ENDS)
    return Cost(
        samples=round(ended / updates),
        tokens=round(tokens / updates),
        seconds=float(np.nansum(run.column("step_seconds"))),
        effective=sum(s["effective_samples"] * s.get("gate_acceptance", 1.0) for s in run.steps) / updates,
    )


def read_cell(cell: Cell, measure: str | None) -> dict[str, object]:
    """One line of `ablation.json`."""
    run = read_run(cell.folder)
    name, value = outcome(run, measure)
    return {"variant": cell.variant, "seed": cell.seed, "measure": name, "value": value, "cost": asdict(cost(run))}
