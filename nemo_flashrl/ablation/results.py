"""What a finished cell came to and what it cost, from the files of its run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np

from nemo_flashrl.ablation.cells import Cell
from nemo_flashrl.run.jsonl import read_json_lines
from nemo_flashrl.run.record import RunRecord, read_run

NO_ENDS = ("episodes_in_flight",)
LAST_SHARE = 0.1  # of the steps, whose mean is the outcome


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
