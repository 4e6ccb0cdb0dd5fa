"""What a run came to: its cost, four indicators of how it got there; and runs compared, seed by seed.

Intervals are Student's t over seeds. A difference is significant when the interval of its mean excludes 0; with
k variants each is held to 1 - 0.05 / k (Bonferroni), so that all together are wrong in one ablation of twenty at most.
With fewer than three seeds every difference is inconclusive.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

LEVEL = 0.95
FEWEST_SEEDS = 3
BETTER, WORSE, INCONCLUSIVE = "higher", "lower", "inconclusive"

COSTS = ("samples", "tokens", "seconds")
LAST_SHARE = 0.1  # of the steps, whose mean is the outcome
CONVERGED = 0.9  # of the way from a curve's first tenth to its last tenth
SMOOTHED = 5  # steps of the running mean that goes this way
SPIKES = ("grad_norm", "loss", "kl")
SPIKE_MADS = 6.0  # median absolute deviations above the median
SPIKE_WINDOW, SPIKE_FEWEST = 20, 10  # steps before, whose median that is; with fewer than the second nothing is judged
LEAST_MAD = 0.01  # of the median: a curve that hardly moves has no spike of a thousandth
ROUNDING = 1e-6  # of a loss or norm below this the rest is rounding


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


@dataclass(frozen=True, slots=True)
class Indicators:
    """How one run got to its outcome; None where a number is not defined."""

    steps_to_90: float | None  # until the curve has converged
    oscillation: float | None  # standard deviation about a line, of the curve from there on
    amplitude: float | None  # its largest less its smallest deviation from that line
    pass_at_k: float | None
    tokens_per_step: float | None  # slope of the tokens of a trajectory
    spikes: int | None  # steps at which one of the next three is one
    grad_norm_spikes: int | None
    loss_spikes: int | None
    kl_spikes: int | None


def last_mean(values: np.ndarray) -> float:
    """Of the last tenth of the values, one at least."""
    return float(values[-max(1, round(LAST_SHARE * len(values))) :].mean())


def convergence(steps: np.ndarray, values: np.ndarray) -> tuple[float | None, float | None, float | None]:
    """(steps to 90%, oscillation, amplitude) of a curve.

    It has converged at the first step whose mean with the four before it has gone 90% of the way from the mean of the
    first tenth of the curve to that of the last. From this step on a line is fitted by least squares: the oscillation
    is the standard deviation of the residuals, divided by n - 2, the amplitude their range.

    Args:
        steps, values: [points], finite.

    Returns:
        None for all three where there are fewer than ten points or the way is zero; for the last two where fewer than
        three points are left.
    """
    if len(values) < 2 * SMOOTHED:
        return None, None, None
    way = last_mean(values) - (start := last_mean(values[::-1]))
    running = np.convolve(values, np.full(SMOOTHED, 1 / SMOOTHED), mode="valid")
    there = np.flatnonzero((running - start) / way >= CONVERGED) if way else np.array([], dtype=np.int64)
    if not len(there):
        return None, None, None
    first = int(there[0]) + SMOOTHED - 1
    x, y = steps[first:], values[first:]
    if (gradient := slope(x, y)) is None:
        return float(steps[first]), None, None
    left = y - y.mean() - gradient * (x - x.mean())
    return float(steps[first]), float(np.sqrt((left**2).sum() / (len(y) - 2))), float(left.max() - left.min())


def slope(steps: np.ndarray, values: np.ndarray) -> float | None:
    """Of the least-squares line; None with fewer than three points."""
    if len(values) < 3:
        return None
    centred = steps - steps.mean()
    return float((centred * values).sum() / (centred**2).sum())


def spikes(values: Sequence[float]) -> set[int] | None:
    """Places in `values` that stand out from the 20 finite values before them.

    |value| > median + 6 MAD of those |values|, MAD their median distance from the median, 0.01 median at least; so is
    what is not finite. With fewer than ten before it nothing is judged; None where nothing was.

    >>> sorted(spikes([1.0, 1.2] * 6 + [2.0, 1.7]))  # 2.0 is above 1.1 + 6 * 0.1, 1.7 not above 1.2 + 6 * 0.2
    [12]
    """
    found, before, judged = set(), [], False
    for place, size in enumerate(np.abs(np.asarray(values, dtype=np.float64))):
        recent = np.array(before[-SPIKE_WINDOW:])
        if len(recent) >= SPIKE_FEWEST:
            judged = True
            middle = np.median(recent)
            mad = max(np.median(np.abs(recent - middle)), LEAST_MAD * middle)
            if not np.isfinite(size) or size > max(middle + SPIKE_MADS * mad, ROUNDING):
                found.add(place)
        if np.isfinite(size):
            before.append(size)
    return found if judged else None


def spikes_of(records: Sequence[Mapping[str, Any]]) -> list[int | None]:
    """[steps with any, then of grad norm, loss, KL]; what JSON had no number for (null) is not finite."""
    counts: list[int | None] = []
    steps: set[int] | None = None
    for name in SPIKES:
        own = [record for record in records if name in record]
        found = spikes([math.nan if record[name] is None else record[name] for record in own])
        counts.append(None if found is None else len(found))
        if found is not None:
            steps = (steps or set()) | {own[place]["step"] for place in found}
    return [None if steps is None else len(steps), *counts]


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
