"""The terms of a reward over a fixed set of samples: how each is distributed, what stands out, what follows length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nemo_flashrl.algorithms.length_penalty import LengthPenalty
from nemo_flashrl.config import RunConfig

BLOCKS = " ▁▂▃▄▅▆▇█"
BINS = 12
LENGTH = "length in tokens"  # of the policy; a yardstick, no term
FOLLOWS_LENGTH = 0.5  # |correlation| from which a term pays for length
ROW_LENGTHS = {
    "tokens": lambda row: row["action_tokens"],
    "turns": lambda row: row["turns"],
    "new_tokens": lambda row: row["action_tokens"] * (1 - row["repeated_token_share"]),
}


def reward_terms(rows: Sequence[Mapping[str, Any]], config: RunConfig) -> dict[str, np.ndarray]:
    """Term -> float64 [samples], as it counts in the first step, from lines of `trajectories.jsonl`.

    The environment's terms that the configuration gives no coefficient are there as they are, marked "not used".
    """
    given, penalty = config.advantage.shaping, config.length_penalty
    terms = {"reward": np.array([row["reward"] for row in rows], dtype=np.float64)}
    for name in sorted({name for row in rows for name in row.get("shaping") or {}} | set(given)):
        values = np.array([(row.get("shaping") or {}).get(name, 0.0) for row in rows], dtype=np.float64)
        title = f"shaping.{name}" if name in given else f"shaping.{name} (not used)"
        terms[title] = values * given.get(name, 1.0)
    if penalty.coefficient > 0:
        lengths = torch.tensor([float(ROW_LENGTHS[penalty.unit](row)) for row in rows])
        terms["length penalty"] = -LengthPenalty(penalty.coefficient, penalty.limit)(lengths, 0).double().numpy()
    terms[LENGTH] = np.array([row["action_tokens"] for row in rows], dtype=np.float64)
    return terms


@dataclass(frozen=True)
class TermSummary:
    """One term over the samples."""

    name: str
    mean: float
    std: float
    lowest: float
    median: float
    highest: float
    outliers: tuple[int, ...]  # places of samples, the farthest first
    with_length: float  # Pearson correlation with the sampled tokens; NaN where one of the two does not vary
    histogram: str


def summarize(name: str, values: np.ndarray, lengths: np.ndarray) -> TermSummary:
    """What a person looks at."""
    varies = values.std() > 0 and lengths.std() > 0
    counts, _ = np.histogram(values, bins=BINS)
    heights = np.ceil(counts / counts.max() * (len(BLOCKS) - 1)).astype(int)
    return TermSummary(
        name=name,
        mean=float(values.mean()),
        std=float(values.std()),
        lowest=float(values.min()),
        median=float(np.median(values)),
        highest=float(values.max()),
        outliers=tuple(outliers(values)),
        with_length=float(np.corrcoef(values, lengths)[0, 1]) if varies else float("nan"),
        histogram="".join(BLOCKS[height] for height in heights),
    )


def outliers(values: np.ndarray) -> list[int]:
    """Places that lie more than 3 interquartile ranges outside the quartiles (Tukey's "far out"), the farthest first.

    Where the quartiles are equal, more than 10 mean absolute deviations from the median: a tenth of ones among zeros is
    no outlier, one 100 among twenty zeros is.
    """
    first, middle, third = np.quantile(values, [0.25, 0.5, 0.75])
    if third > first:
        reach, distance = 3 * (third - first), np.maximum(values - third, first - values)
    else:
        reach, distance = 10 * np.abs(values - middle).mean(), np.abs(values - middle)
    far = np.flatnonzero(distance > reach)
    return far[np.argsort(-distance[far], kind="stable")].tolist()


def findings(terms: Mapping[str, np.ndarray]) -> list[str]:
    """What should be changed before a run."""
    lengths, found = terms[LENGTH], []
    reward = terms["reward"]
    if reward.std() == 0:
        found.append(f"reward is {reward[0]:g} on every sample: every advantage is 0, no gradient")
    for name, values in terms.items():
        if name == LENGTH or name.endswith("(not used)"):
            continue
        own = summarize(name, values, lengths)
        if abs(own.with_length) > FOLLOWS_LENGTH and name != "length penalty":
            found.append(f"{name} correlates with length by {own.with_length:+.2f}: it rewards length, not the task")
        if name != "reward" and own.std > reward.std() > 0:
            found.append(f"{name} varies more than the reward ({own.std:.3g} against {reward.std():.3g}): it dominates")
        if own.outliers:
            worst = own.outliers[0]
            found.append(
                f"{name} has {len(own.outliers)} outlier(s), the largest {values[worst]:g} at sample {worst}, with a "
                f"median of {own.median:g}: clip it, or algorithm.settings.normalisation=quantile"
            )
    return found


def as_table(terms: Mapping[str, np.ndarray]) -> str:
    """One line a term."""
    width = max(map(len, terms))
    head = f"{'term':<{width}}  {'mean':>9} {'std':>9} {'min':>9} {'median':>9} {'max':>9}  outliers  with length"
    lines = [f"{head}  from min to max"]
    for name, values in terms.items():
        own = summarize(name, values, terms[LENGTH])
        numbers = " ".join(f"{v:>9.4g}" for v in (own.mean, own.std, own.lowest, own.median, own.highest))
        correlation = "-" if np.isnan(own.with_length) else f"{own.with_length:+.2f}"
        lines.append(f"{name:<{width}}  {numbers}  {len(own.outliers):>8}  {correlation:>11}  |{own.histogram}|")
    return "\n".join(lines)
