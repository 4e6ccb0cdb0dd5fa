"""How the sampler's temperature moves over a run: steps, each from a share of the optimizer steps on.

It follows the number of optimizer steps alone, so a run resumed from a checkpoint needs no other state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

HIGHEST = 100.0
_ROUNDING = 1e-9  # 0.29 * 100 is 28.999999999999996


class TemperatureSchedule:
    """The temperature of the step.

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
            if not (math.isfinite(temperature) and 0 < temperature <= HIGHEST):
                raise ValueError(
                    f"rollout.temperature_schedule: temperature {temperature!r} must be above 0, at most {HIGHEST:g}"
                )
        self.points = [(share * steps - _ROUNDING, temperature) for share, temperature in points]

    def __call__(self, step: int) -> float:
        """The temperature while `step` optimizer steps are done."""
        return next(temperature for start, temperature in reversed(self.points) if step >= start)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
