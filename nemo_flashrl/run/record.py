"""A run's folder, read back: metrics, configuration, and where its trajectories are; and what names its origin.

<output>/versions.json   the software of each start that differs from the one before, with the step that it began after
<output>/wandb_run_id    under which a run is logged to Weights & Biases, however often it is resumed
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import secrets
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_flashrl.config import read_plain
from nemo_flashrl.metrics.progress import LOGS, START
from nemo_flashrl.run.jsonl import read_metrics, written_whole

VERSIONS, WANDB_ID = "versions.json", "wandb_run_id"
PACKAGES = ("nemo_flashrl", "torch", "nemo-toolkit", "megatron-core", "transformer-engine", "transformers")


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


def versions() -> dict[str, str]:
    """Of Python, of the packages that a run's numbers hang on, and this package's commit; what there is none of is left
    out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found | ({"commit": commit} if (commit := _commit()) else {})


def _commit() -> str:
    """Of the checkout that this package is imported from, with -dirty where files were changed; empty without one."""
    checkout = Path(__file__).parents[2]
    if not (checkout / ".git").exists():  # an installed package, perhaps inside another project's repository
        return ""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


def record_versions(folder: Path, step: int, found: Mapping[str, Any]) -> None:
    """Add a start that begins after `step`, where its versions are not those of the last one."""
    file = folder / VERSIONS
    starts = json.loads(file.read_text()) if file.exists() else []
    if not starts or {**starts[-1], "after_step": step} != {"after_step": step, **found}:
        with written_whole(file) as staging:
            staging.write_text(json.dumps([*starts, {"after_step": step, **found}], indent=2) + "\n")


def wandb_run_id(folder: Path, resumed: bool) -> str:
    """The id that the folder holds, for a resumed run; else a new one."""
    file = folder / WANDB_ID
    return file.read_text().strip() if resumed and file.exists() else secrets.token_hex(4)


def last_starts(folder: Path) -> dict[int, list[str]]:
    """Rank -> the lines of its log from its last start on, without the line that says so."""
    found = {}
    for file in sorted((folder / LOGS).glob("rank-*.log")):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        starts = [place for place, line in enumerate(lines) if line.startswith(START)]
        if starts and file.stem[5:].isdecimal():
            found[int(file.stem[5:])] = lines[starts[-1] + 1 :]
    return found
