"""Means with confidence intervals, and paired differences to the baseline, seed by seed.

Intervals are Student's t over seeds. A difference is significant when the interval of its mean excludes 0; with
k variants each is held to 1 - 0.05 / k (Bonferroni), so that all together are wrong in one ablation of twenty at most.
With fewer than three seeds every difference is inconclusive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.95
FEWEST_SEEDS = 3
BETTER, WORSE, INCONCLUSIVE = "higher", "lower", "inconclusive"


@dataclass(frozen=True)
class Interval:
    """A mean and where it may lie; infinite bounds with a single value."""

    mean: float
    low: float
    high: float


def t_interval(values: Sequence[float], level: float = LEVEL) -> Interval:
    """Of the mean of independent values.

    >>> t_interval([1.0, 2.0, 3.0])  # 2 +- 4.303 / sqrt 3
    Interval(mean=2.0, low=-0.48413..., high=4.48413...)
    """
    data = np.asarray(values, dtype=np.float64)
    mean = float(data.mean())
    if len(data) < 2:
        return Interval(mean, -np.inf, np.inf)
    half = float(stats.t.ppf((1 + level) / 2, len(data) - 1) * data.std(ddof=1) / np.sqrt(len(data)))
    return Interval(mean, mean - half, mean + half)


@dataclass(frozen=True)
class Comparison:
    """A variant against the baseline."""

    variant: str
    own: Interval  # of its values
    difference: Interval | None  # to the baseline; None for the baseline itself, and without a seed in common
    verdict: str
    seeds: int  # that both have


def compare(values: Mapping[str, Mapping[int, float]], baseline: str) -> list[Comparison]:
    """`values`: variant -> seed -> measure; the baseline first, then the others in their order."""
    others = [name for name in values if name != baseline]
    level = 1 - (1 - LEVEL) / max(len(others), 1)
    rows = [Comparison(baseline, t_interval([*values[baseline].values()]), None, "", len(values[baseline]))]
    for name in others:
        seeds = sorted(values[name].keys() & values[baseline].keys())
        differences = [values[name][seed] - values[baseline][seed] for seed in seeds]
        interval = t_interval(differences, level) if differences else None
        verdict = INCONCLUSIVE
        if len(seeds) >= FEWEST_SEEDS and interval.low > 0:
            verdict = BETTER
        elif len(seeds) >= FEWEST_SEEDS and interval.high < 0:
            verdict = WORSE
        rows.append(Comparison(name, t_interval([*values[name].values()]), interval, verdict, len(seeds)))
    return rows
