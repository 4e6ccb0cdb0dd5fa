"""What a rule of the doctor is, and how rules look at a column."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nemo_flashrl.run.record import RunRecord

RECENT = 10  # steps that count as "now"
FEWEST = 8  # steps below which a trend is not judged


@dataclass(frozen=True)
class Rule:
    """One thing that goes wrong. `check` returns the evidence, or an empty text where it does not fire."""

    name: str
    title: str
    check: Callable[[RunRecord], str]
    causes: tuple[str, ...]  # the likeliest first
    change: str  # the setting to change
    change_where: tuple[tuple[str, str], ...] = ()  # instead of it: ("rollout.mode=sync", the setting to change there)
    change_first: Callable[[RunRecord], str] = lambda run: ""  # before it, what was worked out for this run

    def change_for(self, run: RunRecord) -> str:
        """The advice that has an effect with the run's own settings."""
        for condition, change in self.change_where:
            name, _, value = condition.partition("=")
            if setting(run, name) == value:
                return change
        first = self.change_first(run)
        return f"{first}. In general: {self.change}" if first else self.change


def recent(values: np.ndarray, count: int = RECENT) -> float:
    """Mean of the last `count` finite values; NaN where there is none."""
    finite = values[np.isfinite(values)][-count:]
    return float(finite.mean()) if len(finite) else float("nan")


def early(values: np.ndarray, count: int = RECENT) -> float:
    """Mean of the first `count` finite values, of the first half at most."""
    finite = values[np.isfinite(values)]
    finite = finite[: min(count, max(len(finite) // 2, 1))]
    return float(finite.mean()) if len(finite) else float("nan")


def thirds(values: np.ndarray) -> tuple[float, float]:
    """Means of the first and of the last third of the finite values."""
    finite = values[np.isfinite(values)]
    size = max(len(finite) // 3, 1)
    return (float(finite[:size].mean()), float(finite[-size:].mean())) if len(finite) else (float("nan"),) * 2


def long_enough(run: RunRecord) -> bool:
    """Whether a trend can be told."""
    return len(run.steps) >= FEWEST


def steps_where(run: RunRecord, holds: np.ndarray) -> str:
    """The steps of a bool column as ranges: "steps 3-7, 9"."""
    numbers = [step["step"] for step, yes in zip(run.steps, holds, strict=True) if yes]
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in ranges[:5]]
    return f"step{'s' * (len(numbers) > 1)} {', '.join(shown)}{', ...' if len(ranges) > 5 else ''}"


def last_steps(run: RunRecord, count: int = RECENT) -> str:
    """The steps that `recent` looks at."""
    steps = [step["step"] for step in run.steps[-count:]]
    return f"steps {steps[0]}-{steps[-1]}"


def setting(run: RunRecord, name: str, default: object = None) -> object:
    """A dotted key of the run's configuration."""
    value: object = run.configuration
    for part in name.split("."):
        value = value.get(part, default) if isinstance(value, dict) else default
    return value
