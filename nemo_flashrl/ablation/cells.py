"""What is run: a baseline and, for each value of each varied key, the baseline with that one key changed."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_flashrl import algorithms, environments
from nemo_flashrl.config import RunConfig, load, quoted, read_plain, settings_of

BASELINE = "baseline"


@dataclass(frozen=True)
class Cell:
    """One run: a variant with a seed."""

    variant: str  # BASELINE, or key=value
    seed: int
    folder: Path
    overrides: tuple[str, ...]
    steps: int

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")


def plan_cells(name: str, overrides: Sequence[str], vary: Sequence[str], seeds: int, output: Path) -> list[Cell]:
    """All cells, seed by seed, so that an interrupted ablation has whole comparisons.

    Args:
        name: a configuration, as `flashrl train` takes it.
        overrides: settings of every cell.
        vary: texts "KEY=V1,V2,..."; a value that the baseline has is the baseline.
        seeds: 0 to seeds - 1 are the `trainer.seed` of each variant.
        output: folder of all runs.

    Raises:
        ValueError: a cell's configuration is refused, or no value differs from the baseline.
    """
    base = _load(name, overrides)
    variants: dict[str, tuple[tuple[str, ...], int]] = {BASELINE: ((), base.trainer.steps)}
    seen = [_resolved(dataclasses.asdict(base))]
    for text in vary:
        key, values = parse_vary(text)
        if key in ("output", "trainer.seed"):
            raise ValueError(f"--vary {key}: an ablation sets it itself")
        for value in values:
            change = f"{key}={value}"
            config = _load(name, [*overrides, change])
            if (resolved := _resolved(dataclasses.asdict(config))) not in seen:
                seen.append(resolved)
                variants[change] = ((change,), config.trainer.steps)
    if len(variants) == 1:
        raise ValueError(f"--vary {' '.join(vary)}: no value differs from the baseline's")
    cells = []
    for seed in range(seeds):
        for variant, (change, steps) in variants.items():
            folder = output / re.sub(r"[^\w.=+-]+", "_", variant) / f"seed={seed}"
            own = (*overrides, *change, f"trainer.seed={seed}", f"output={quoted(folder)}")
            cells.append(Cell(variant, seed, folder, own, steps))
    if len({cell.folder for cell in cells}) < len(cells):
        raise ValueError(f"--vary {' '.join(vary)}: two values have the same name as a folder")
    return cells


def check_same(name: str, cell: Cell) -> None:
    """A run that is kept was run as the cell asks.

    Raises:
        ValueError: its folder holds a run with other settings.
    """
    kept = _resolved(read_plain(cell.folder / "config.yaml"))
    asked = _resolved(dataclasses.asdict(load(name, cell.overrides)))
    other = sorted(key for key in asked if kept.get(key) != asked[key] and key not in ("output", "checkpoint"))
    if other:
        raise ValueError(
            f"{cell.folder}: the run there has other settings under {', '.join(other)}: choose another --output"
        )


def parse_vary(text: str) -> tuple[str, list[str]]:
    """ "KEY=V1,V2" -> (KEY, [V1, V2]); commas inside brackets and quotes belong to a value.

    >>> parse_vary("rollout.temperature_schedule=[],[[0,1.0],[0.25,0.85]]")
    ('rollout.temperature_schedule', ['[]', '[[0,1.0],[0.25,0.85]]'])
    """
    key, separator, rest = text.partition("=")
    values, depth, quote = [""], 0, ""
    for character in rest:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        depth += (character in "[{(") - (character in "]})") if not quote else 0
        if character == "," and depth == 0 and not quote:
            values.append("")
        else:
            values[-1] += character
    if not separator or not key or not all(values):
        raise ValueError(f"--vary {text!r}: must be KEY=V1,V2,...")
    return key, values


def _load(name: str, overrides: Sequence[str]) -> RunConfig:
    return load(name, [*overrides, "output=unused"])


def _resolved(plain: dict[str, Any]) -> dict[str, Any]:
    """A configuration as plain values with plug-ins' defaults filled in: equal for runs that are the same."""
    for kind, package in (("algorithm", algorithms), ("environment", environments)):
        plugin = package.load(plain[kind]["name"])
        plain[kind]["settings"] = dataclasses.asdict(settings_of(plugin, plain[kind]["settings"], kind))
    return json.loads(json.dumps(plain, default=str, sort_keys=True))
