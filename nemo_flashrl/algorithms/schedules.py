"""What moves over a run: the KL coefficient, the sampler's temperature, the group size; one number a step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

KL_SCHEDULES = ("fixed", "annealed", "adaptive", "entropy")
_HELD_SHARE, _LAST_SHARE = 0.1, 0.2
_GAIN, _ERROR_LIMIT = 0.1, 0.2
_RAISE, _HIGHEST = 1.1, 10.0
_FALL_STEPS = 10


class KlCoefficient:
    """The coefficient of the KL penalty, in `value`; the same on every rank.

    fixed       coefficient
    annealed    coefficient for the first tenth of the steps, then linear to a fifth of it at the last step
    adaptive    times 1 + 0.1 clip(KL / target - 1, -0.2, 0.2) after each step (Ziegler et al. 2019)
    entropy     times 1.1 after a step whose entropy is under the floor, or has lost more than its share in 10 steps;
                back by the same factor after any other; from coefficient to 10 times coefficient

    >>> annealed = KlCoefficient(0.01, schedule="annealed", steps=11)
    >>> [annealed.after_step() or round(annealed.value, 4) for _ in range(10)]  # held for 1.1 steps, 0.002 at the last
    [0.01, 0.0093, 0.0083, 0.0074, 0.0065, 0.0056, 0.0047, 0.0038, 0.0029, 0.002]

    Args:
        coefficient: where it starts.
        schedule: one of the table above.
        steps: optimizer steps of the whole run.
        target: KL in nats per action token that `adaptive` aims at.
        entropy_floor: nats per action token, for `entropy`.
        entropy_fall: for `entropy`, the share of its entropy that a policy may lose in 10 steps; 1: any.
    """

    def __init__(
        self,
        coefficient: float,
        *,
        schedule: str = "fixed",
        steps: int,
        target: float = 0.05,
        entropy_floor: float = 0.5,
        entropy_fall: float = 0.3,
    ) -> None:
        if schedule not in KL_SCHEDULES:
            raise ValueError(f"kl.schedule={schedule!r}: must be one of {', '.join(KL_SCHEDULES)}")
        self.start, self.schedule, self.steps = coefficient, schedule, steps
        self.target, self.entropy_floor, self.entropy_fall = target, entropy_floor, entropy_fall
        self.value = coefficient
        self.step = 0  # optimizer steps done
        self._entropies: list[float] = []  # of the last 10 steps that have one

    def after_step(self, kl: float = math.nan, entropy: float = math.nan) -> None:
        """Move on by one step whose mean KL and entropy, in nats per action token, were these; NaN where unknown."""
        self.step += 1
        if self.schedule == "annealed":
            held = _HELD_SHARE * self.steps
            done = min(max(self.step - held, 0) / max(self.steps - 1 - held, 1e-9), 1.0)
            self.value = self.start * (1 - (1 - _LAST_SHARE) * done)
        elif self.schedule == "adaptive" and math.isfinite(kl):
            error = min(max(kl / self.target - 1, -_ERROR_LIMIT), _ERROR_LIMIT)
            self.value *= 1 + _GAIN * error
        elif self.schedule == "entropy" and math.isfinite(entropy):
            before = self._entropies[0] if len(self._entropies) == _FALL_STEPS else entropy
            self._entropies = [*self._entropies, entropy][-_FALL_STEPS:]
            low = entropy < max(self.entropy_floor, (1 - self.entropy_fall) * before)
            factor = _RAISE if low else 1 / _RAISE
            self.value = min(max(self.value * factor, self.start), self.start * _HIGHEST)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"value": self.value, "step": self.step, "entropies": list(self._entropies)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore that state; a schedule that follows the step alone is worked out anew from its own settings."""
        self.step = int(state["step"])
        self._entropies = list(state.get("entropies", []))
        if self.schedule in ("adaptive", "entropy"):
            self.value = float(state["value"])
        elif self.schedule == "annealed" and self.step:
            self.step -= 1
            self.after_step()


HIGHEST_TEMPERATURE = 100.0
_ROUNDING = 1e-9  # 0.29 * 100 is 28.999999999999996


class TemperatureSchedule:
    """The sampler's temperature: steps, each from a share of the optimizer steps on.

    It follows the number of optimizer steps alone, so a resumed run needs no other state.

    >>> at = TemperatureSchedule([(0, 1.0), (0.25, 0.85)], steps=8)  # a quarter of 8 steps is 2
    >>> [at(step) for step in range(4)]
    [1.0, 1.0, 0.85, 0.85]

    Args:
        points: (share of the steps, temperature from there on), shares ascending from 0 to below 1.
        steps: optimizer steps of the whole run.

    Raises:
        ValueError: points that are no such list.
    """

    def __init__(self, points: Sequence[Sequence[float]], steps: int) -> None:
        pairs = [p for p in points if isinstance(p, list | tuple) and len(p) == 2 and all(map(_is_number, p))]
        shares = [share for share, _ in pairs]
        if not pairs or len(pairs) < len(points) or shares[0] != 0 or sorted({*shares}) != shares or shares[-1] >= 1:
            raise ValueError(
                f"rollout.temperature_schedule={list(points)}: must be pairs [share of the steps, "
                "temperature], shares ascending from 0 to below 1, such as [[0, 1.0], [0.25, 0.85]]"
            )
        for _, temperature in points:
            if not (math.isfinite(temperature) and 0 < temperature <= HIGHEST_TEMPERATURE):
                raise ValueError(
                    f"rollout.temperature_schedule: temperature {temperature!r} must be above 0, "
                    f"at most {HIGHEST_TEMPERATURE:g}"
                )
        self.points = [(share * steps - _ROUNDING, temperature) for share, temperature in points]

    def __call__(self, step: int) -> float:
        """The temperature while `step` optimizer steps are done."""
        return next(temperature for start, temperature in reversed(self.points) if step >= start)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


GROUP_SIZES = (4, 8, 16, 32)


class FixedGroupSize:
    """How many rollouts a prompt gets: `value`, for all of them. `GroupSize` and `PromptGroupSizes` move it."""

    def __init__(self, value: int) -> None:
        self.value = value

    @property
    def largest(self) -> int:
        """The most that a prompt of the next batches can get."""
        return self.value

    def begin(self, prompt_index: int, task_index: int) -> int:
        """The rollouts of a prompt that is about to be played."""
        return self.value

    def dropped(self, prompt_index: int, rewards: Sequence[float], reason: str) -> None:
        """A prompt's group, with these rewards, enters no batch; "tied": for its rewards are all equal."""

    def trained(self, groups: Mapping[int, Sequence[float]]) -> None:
        """A batch has been used: the rewards of each group by prompt index."""

    def metrics(self, groups: Sequence[Sequence[float]]) -> dict[str, float]:
        """What a step's metrics say of a batch with these groups of rewards."""
        return {}

    def state_dict(self) -> dict[str, object]:
        """What a checkpoint keeps; empty where nothing moves."""
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore that state; one of another way to move the group size changes nothing."""


class GroupSize(FixedGroupSize):
    """How many rollouts a prompt gets, in `value`, moved by how much the rewards inside a group differ.

    Every `every` steps the mean over these steps of the groups' reward standard deviation is compared with the
    threshold: above it G goes one size up, below it one size down. A batch keeps its number of trajectories, so the
    sampling budget of a step stays what it was and the number of prompts changes.

    >>> size = GroupSize(8, every=2, threshold=0.3, batch_size=64)
    >>> [size.after_step(std) or size.value for std in (0.4, 0.4, 0.1, 0.1, 0.1, 0.1)]
    [8, 16, 16, 8, 8, 4]

    Args:
        start: of the first steps; one of 4, 8, 16, 32.
        every: optimizer steps between two decisions.
        threshold: of the mean standard deviation of rewards inside a group (divided by G).
        batch_size: trajectories of a step; sizes that do not divide it are not used.

    Raises:
        ValueError: a start that is no such size.
    """

    def __init__(self, start: int, *, every: int, threshold: float, batch_size: int) -> None:
        self.sizes = [size for size in GROUP_SIZES if batch_size % size == 0]
        if start not in self.sizes:
            raise ValueError(
                f"algorithm.settings.group_size={start}: with group_size.every={every} and "
                f"rollout.batch_size={batch_size} it must be one of {self.sizes or 'none; change rollout.batch_size'}"
            )
        super().__init__(start)
        self.every, self.threshold = every, threshold
        self._deviations: list[float] = []  # since the last decision

    def trained(self, groups: Mapping[int, Sequence[float]]) -> None:
        """One step on these groups is done."""
        self.after_step(statistics.fmean(statistics.pstdev(rewards) for rewards in groups.values()))

    def after_step(self, reward_std: float) -> None:
        """Move on by one step whose groups' rewards had this mean standard deviation."""
        self._deviations.append(reward_std)
        if len(self._deviations) < self.every:
            return
        mean, place = sum(self._deviations) / self.every, self.sizes.index(self.value)
        place += (mean > self.threshold) - (mean < self.threshold)
        self.value = self.sizes[min(max(place, 0), len(self.sizes) - 1)]
        self._deviations = []

    def state_dict(self) -> dict[str, object]:
        """What a checkpoint keeps."""
        return {"value": self.value, "deviations": list(self._deviations)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore that state; a size that no longer fits the batch is left at the start's."""
        if state.get("value") in self.sizes:
            self.value = int(state["value"])
        self._deviations = list(state.get("deviations", ()))[-(self.every - 1) :] if self.every > 1 else []
