"""A run's folder, read back: metrics, configuration, and where its trajectories are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_flashrl.config import read_plain
from nemo_flashrl.metrics.progress import LOGS, START
from nemo_flashrl.run.jsonl import read_metrics


@dataclass(frozen=True)
class RunRecord:
    """What a run left; `steps` are the objects of its `metrics.jsonl`."""

    folder: Path
    steps: list[dict[str, Any]]
    configuration: Mapping[str, Any]  # empty where the run wrote none

    @property
    def trajectories(self) -> Path:
        return self.folder / "trajectories.jsonl"

    @property
    def samples(self) -> Path:
        return self.folder / "samples.jsonl"

    @property
    def configuration_without_seed(self) -> str | None:
        """Equal for runs that differ in seed, folder and starting checkpoint's path alone."""
        if not self.configuration:
            return None
        return json.dumps(_without(self.configuration, {"seed", "output", "path"}), sort_keys=True, default=str)

    def column(self, name: str) -> np.ndarray:
        """float64 [number of steps]; NaN where a step has no such number."""
        values = [step.get(name) for step in self.steps]
        return np.array([v if isinstance(v, int | float) else np.nan for v in values], dtype=np.float64)

    def has(self, name: str) -> bool:
        """Whether any step names it."""
        return any(name in step for step in self.steps)


def _without(value: Any, names: set[str]) -> Any:
    if isinstance(value, Mapping):
        return {k: _without(v, names) for k, v in value.items() if k not in names}
    return value


def read_run(folder: Path, *, may_be_empty: bool = False) -> RunRecord:
    """Read `folder`, or the `run` in it, as a rehearsal leaves one.

    Args:
        may_be_empty: take a run that ended in its first step too, which left logs and no metrics.

    Raises:
        ValueError: there is no `metrics.jsonl` with a step in it.
    """
    places = (folder, folder / "run")
    inner = next((f for f in places if (f / "metrics.jsonl").is_file()), None)
    steps = read_metrics(inner / "metrics.jsonl") if inner else []
    if not steps:
        inner = next((f for f in places if (f / LOGS).is_dir()), None)
        if not (may_be_empty and inner):
            raise ValueError(f"{str(folder)!r} holds no metrics.jsonl with a step in it: give the folder of a run")
    file = inner / "config.yaml"
    configuration = read_plain(file) if file.is_file() else {}
    return RunRecord(inner, steps, configuration)


def last_starts(folder: Path) -> dict[int, list[str]]:
    """Rank -> the lines of its log from its last start on, without the line that says so."""
    found = {}
    for file in sorted((folder / LOGS).glob("rank-*.log")):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        starts = [place for place, line in enumerate(lines) if line.startswith(START)]
        if starts and file.stem[5:].isdecimal():
            found[int(file.stem[5:])] = lines[starts[-1] + 1 :]
    return found
