"""Advantages within groups: the rollouts of one prompt are compared with each other alone.

    z_score     (R_i - mean) / (std + epsilon)          Shao et al. 2024; std unbiased, divided by G - 1
    quantile    2 q_i - 1, q_i the middle rank of R_i: (those below + half of those equal, itself too) / G
    none        R_i - mean                              Liu et al. 2025 (Dr. GRPO)

How far an outlier lies from the others does not enter `quantile`. Of rewards 0 and 1 it makes R_i - mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_flashrl.algorithms.tokens import working_dtype

NORMALISATIONS = ("z_score", "quantile", "none")


def group_advantages(
    rewards: Tensor, groups: Tensor, *, epsilon: float = 1e-6, normalisation: str = "z_score"
) -> Tensor:
    """Advantages of each reward in its group, as in the table above; a group of equal rewards has exactly 0.

    >>> group_advantages(torch.tensor([1.0, 0.0, 5.0, 5.0]), torch.tensor([7, 7, 3, 3]), epsilon=0.0)
    tensor([ 0.7071, -0.7071,  0.0000,  0.0000])

    Args:
        rewards: [B], finite.
        groups: int64 [B], equal for the rollouts of one prompt; any numbers, in any order.
        epsilon: added to the standard deviation.
        normalisation: "z_score", "quantile" or "none".

    Returns:
        [B], float64 if `rewards` are, else float32.

    Raises:
        ValueError: a group of one rollout.
    """
    _, group, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    if (counts < 2).any():
        alone = groups[(counts < 2)[group]][:5].tolist()
        raise ValueError(
            f"groups {alone} hold one trajectory each: group_size must be at least 2, and none may be lost"
        )
    precise = rewards.double()
    zeros = precise.new_zeros(len(counts))
    if normalisation == "quantile":
        advantages = 2 * _middle_ranks(precise, group) / counts[group] - 1
    else:
        advantages = precise - (zeros.index_add(0, group, precise) / counts)[group]
        if normalisation == "z_score":
            std = (zeros.index_add(0, group, advantages.square()) / (counts - 1)).sqrt()
            advantages = advantages / (std[group] + epsilon)
    lowest, highest = group_bounds(rewards, groups)
    # The mean of equal rewards is rounded: without this, noise over noise would be an advantage of order 1.
    return torch.where(lowest == highest, 0, advantages).to(working_dtype(rewards))


def group_bounds(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest and the highest reward of each trajectory's group, [B] each."""
    names, group = torch.unique(groups, return_inverse=True)
    zeros = rewards.new_zeros(len(names))
    bounds = (zeros.scatter_reduce(0, group, rewards, kind, include_self=False) for kind in ("amin", "amax"))
    lowest, highest = (bound[group] for bound in bounds)
    return lowest, highest


def _middle_ranks(rewards: Tensor, group: Tensor) -> Tensor:
    """Those of the same group that are below, and half of those that are equal, float64 [B]."""
    _, level = torch.unique(rewards, return_inverse=True)
    levels = int(level.max()) + 1
    pairs, place, equal = torch.unique(group * levels + level, return_inverse=True, return_counts=True)
    before = equal.cumsum(0) - equal  # in this and in earlier groups
    owner = pairs // levels
    starts = torch.searchsorted(owner, owner)  # the first pair of the same group
    below = before - before[starts]
    return (below + equal / 2)[place].double()
