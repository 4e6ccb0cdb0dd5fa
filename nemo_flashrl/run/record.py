"""A run's folder, read back: metrics, configuration, and where its trajectories are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_flashrl.config import read_plain
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


def read_run(folder: Path) -> RunRecord:
    """Read `folder`, or the `run` in it, as a rehearsal leaves one.

    Raises:
        ValueError: there is no `metrics.jsonl` with a step in it.
    """
    inner = next((f for f in (folder, folder / "run") if (f / "metrics.jsonl").is_file()), None)
    steps = read_metrics(inner / "metrics.jsonl") if inner else []
    if not steps:
        raise ValueError(f"{str(folder)!r} holds no metrics.jsonl with a step in it: give the folder of a run")
    file = inner / "config.yaml"
    configuration = read_plain(file) if file.is_file() else {}
    return RunRecord(inner, steps, configuration)
