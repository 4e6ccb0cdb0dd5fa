"""Advantages: within groups, where the rollouts of one prompt are compared with each other alone, and of each turn.

    z_score     (R_i - mean) / (std + epsilon)          Shao et al. 2024; std unbiased, divided by G - 1
    quantile    2 q_i - 1, q_i the middle rank of R_i: (those below + half of those equal, itself too) / G
    none        R_i - mean                              Liu et al. 2025 (Dr. GRPO)

How far an outlier lies from the others does not enter `quantile`. Of rewards 0 and 1 it makes R_i - mean.

What `CreditRules` make of an algorithm's own advantages A_i:

    G_ik    = sum_{j >= k} discount^(j - k) r_ij              turn k's own return; r_ij is turn j's reward
    A_ik    = (1 - c) A_i + c (G_ik - mean_i mean_k G_ik) + shaping_i,    clipped to [-clip, clip]

With c = 0 all tokens of a trajectory have one advantage. With c = 1, no discount and a reward at the end alone, A_ik
is R_i minus the batch's mean in every turn. Shaping is never part of a mean or of a standard deviation.

A trajectory that is left out has weight 0 and stays in B, as one that a gate rejects; its reward stays in the
baseline, as it is a sample of the policy like any other.

Legend: B = trajectories of the batch, K_i = turns of trajectory i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_flashrl.algorithms.algorithm import Algorithm
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


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What a batch came to."""

    rewards: Tensor  # float32 [B]
    action_counts: Tensor  # int64 [B], of the tokens that are trained on; 0 only where left out
    groups: Tensor  # int64 [B]
    shaping: Tensor  # float32 [B], added to the advantage
    left_out: Tensor  # bool [B]
    turn_rewards: Sequence[Tensor] = ()  # B of them, float32 [K_i] each; none where a trajectory has one advantage


@dataclass(frozen=True, slots=True)
class Credit:
    """What is trained on."""

    advantages: Tensor  # float32 [B]; with turns, the mean over a trajectory's turns
    token_weights: Tensor  # float32 [B]
    turn_advantages: Sequence[Tensor] = ()  # as `Outcomes.turn_rewards`
    clipped: float = 0.0  # share of the trajectories with an advantage that was clipped


@dataclass(frozen=True, slots=True)
class CreditRules:
    """The settings of the formula above; as they are, the algorithm's advantages stay as they are."""

    clip: float | None = None
    turn_coefficient: float = 0.0
    turn_discount: float = 1.0

    def assign(self, algorithm: Algorithm, outcomes: Outcomes) -> Credit:
        """Advantages and weights of the whole batch.

        Raises:
            ValueError: the algorithm refuses the batch.
        """
        # An algorithm refuses a trajectory without a token: one that is left out for that counts as one token long.
        advantages, weights = algorithm.weigh(outcomes.rewards, outcomes.action_counts.clamp(min=1), outcomes.groups)
        weights = torch.where(outcomes.left_out, 0, weights)
        shaped = advantages + outcomes.shaping
        if not self.turn_coefficient:
            limited = self._clip(shaped)
            return Credit(limited, weights, clipped=float((limited != shaped).float().mean()))
        returns = [turn_returns(rewards, self.turn_discount) for rewards in outcomes.turn_rewards]
        baseline = torch.stack([own.mean() for own in returns]).mean()
        own = self.turn_coefficient
        mixed = [
            (1 - own) * advantage + own * (parts - baseline) + extra
            for advantage, parts, extra in zip(advantages, returns, outcomes.shaping, strict=True)
        ]
        turns = [self._clip(parts) for parts in mixed]
        clipped = [bool((a != b).any()) for a, b in zip(turns, mixed, strict=True)]
        means = torch.stack([parts.mean() for parts in turns])
        return Credit(means, weights, turns, sum(clipped) / len(clipped))

    def _clip(self, advantages: Tensor) -> Tensor:
        return advantages if self.clip is None else advantages.clamp(-self.clip, self.clip)


def turn_returns(rewards: Tensor, discount: float) -> Tensor:
    """Each turn's discounted sum of its own and all later rewards, [K] of [K].

    >>> turn_returns(torch.tensor([1.0, 0.0, 2.0]), 0.5)  # 1 + 0 / 2 + 2 / 4, 0 + 2 / 2, 2
    tensor([1.5000, 1.0000, 2.0000])
    """
    returns, later = torch.empty_like(rewards), 0.0
    for turn in range(len(rewards) - 1, -1, -1):
        later = rewards[turn] + discount * later
        returns[turn] = later
    return returns


@dataclass(frozen=True, slots=True)
class LengthPenalty:
    """Taken off a trajectory's advantage: c max(0, length / limit - 1), c = coefficient max(0, 1 - step / decay_steps).

    Nothing is taken below the limit, so that a policy is not pushed to be short where it has room. What a length counts
    (tokens, turns, tokens that are new) is the caller's choice.

    >>> LengthPenalty(0.5, limit=100, decay_steps=10)(torch.tensor([100, 150, 300]), step=5)
    tensor([0.0000, 0.1250, 0.5000])
    """

    coefficient: float  # of a length twice the limit, at step 0
    limit: float
    decay_steps: int = 0  # optimizer steps until nothing is left of it; 0: it does not decay

    def __call__(self, lengths: Tensor, step: int) -> Tensor:
        """The penalties, float32 [B], of lengths [B] in a batch that is trained on after `step` steps."""
        left = max(0.0, 1 - step / self.decay_steps) if self.decay_steps else 1.0
        return self.coefficient * left * (lengths.float() / self.limit - 1).clamp(min=0)
