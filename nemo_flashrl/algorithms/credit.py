"""What each trajectory, and each of its turns, counts: around an algorithm's own `weigh`.

    A_i     = what the algorithm makes of the rewards alone
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
