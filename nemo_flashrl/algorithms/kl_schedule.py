"""How the coefficient of the KL penalty moves over a run; one number a step, the same on every rank.

fixed       coefficient
annealed    coefficient for the first tenth of the steps, then linear to a fifth of it at the last step
adaptive    times 1 + 0.1 clip(KL / target - 1, -0.2, 0.2) after each step (Ziegler et al. 2019)
entropy     times 1.1 after a step whose entropy is under the floor, or has lost more than its share in 10 steps; back
            by the same factor after any other; from coefficient to 10 times coefficient
"""

from __future__ import annotations

import math
from typing import Any

SCHEDULES = ("fixed", "annealed", "adaptive", "entropy")
_HELD_SHARE, _LAST_SHARE = 0.1, 0.2
_GAIN, _ERROR_LIMIT = 0.1, 0.2
_RAISE, _HIGHEST = 1.1, 10.0
_FALL_STEPS = 10


class KlCoefficient:
    """The coefficient of the step, in `value`.

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
        if schedule not in SCHEDULES:
            raise ValueError(f"kl.schedule={schedule!r}: must be one of {', '.join(SCHEDULES)}")
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
