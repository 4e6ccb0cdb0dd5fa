"""GRPO: groups of rollouts of one prompt, advantages within the group, a clipped surrogate.

Shao et al. 2024 (DeepSeekMath) for the group advantage, Schulman et al. 2017 for the clipped surrogate; `kl.py` adds
the KL to a reference:

    A_i     = (R_i - mean) / (std + epsilon)        over the group; or as in advantages.py
    rho     = exp(logp - logmu)                     against the policy that sampled: one step per batch
    loss_t  = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_flashrl.algorithms.advantages import NORMALISATIONS, group_advantages, group_bounds
from nemo_flashrl.algorithms.algorithm import Gate, TokenBatch
from nemo_flashrl.algorithms.kl import WithKl
from nemo_flashrl.algorithms.tokens import (
    check_batch,
    check_logprobs,
    check_number,
    check_ratios,
    counted_once,
    largest,
    mismatch_stats,
    on_action_tokens,
    scalar,
    trajectory_sums,
    working_dtype,
)
from nemo_flashrl.algorithms.unfused_loss import padded_loss

AGGREGATIONS = ("sample_mean", "token_mean", "sequence_sum")
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class GrpoSettings:
    """What a user may set; a ValueError names the field, its value and the right range."""

    group_size: int = 8  # rollouts per prompt
    clip_low: float = 0.2
    clip_high: float = 0.2  # inf: no upper clip
    aggregation: str = "sample_mean"  # mean over a trajectory's tokens, then over trajectories; or as in AGGREGATIONS
    sequence_constant: float = 1.0  # sequence_sum: what a trajectory's sum is divided by (Dr. GRPO: longest answer)
    normalisation: str = "z_score"  # of a group's rewards: z_score | quantile | none
    advantage_epsilon: float = 1e-6  # added to the standard deviation
    failed_group_floor: float = 0.0  # a group whose rewards are all 0 gets minus this as advantage
    skip_tied_groups: bool = False  # True: a zero-variance group has weight 0, for KL and shaping too

    def __post_init__(self) -> None:
        if not isinstance(self.group_size, int) or self.group_size < 2:
            raise ValueError(
                f"group_size = {self.group_size!r}: must be an integer of at least 2, as an advantage compares"
                " rollouts of one prompt"
            )
        check_number("clip_low", self.clip_low, 0, 1)
        check_number("clip_high", self.clip_high, 0, math.inf)
        check_number("advantage_epsilon", self.advantage_epsilon, 0, _LARGEST)
        check_number("sequence_constant", self.sequence_constant, 1, _LARGEST)
        check_number("failed_group_floor", self.failed_group_floor, 0, _LARGEST)
        for name, choices in (("aggregation", AGGREGATIONS), ("normalisation", NORMALISATIONS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} = {getattr(self, name)!r}: must be one of {', '.join(choices)}")


class Grpo:
    """The `Algorithm` of GRPO (Shao et al. 2024); float64 inputs are computed in float64."""

    Settings = GrpoSettings
    needs_entropy = False
    needs_reference = False
    gates_trajectories = False

    def __init__(self, settings: GrpoSettings = GrpoSettings()) -> None:
        self.settings = settings
        self.group_size = settings.group_size

    def weigh(self, rewards: Tensor, action_counts: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Group advantages and token weights, float32 [B] each, over the whole batch.

        The weight is 1 / (B T_i) for `sample_mean`, 1 / sum_j T_j for `token_mean`, 1 / (B sequence_constant) for
        `sequence_sum`. A group that is skipped has weight 0 and stays in B, as everything that is left out does.

        Raises:
            ValueError: an empty batch, a reward that is not finite, a trajectory without action tokens, a group of one.
        """
        dtype = working_dtype(rewards)
        check_batch(rewards.to(dtype), action_counts)
        settings = self.settings
        advantages = group_advantages(
            rewards, groups, epsilon=settings.advantage_epsilon, normalisation=settings.normalisation
        )
        lowest, highest = group_bounds(rewards, groups)
        tied, all_zero = lowest == highest, (lowest == 0) & (highest == 0)
        if settings.failed_group_floor > 0:
            advantages = torch.where(all_zero, -settings.failed_group_floor, advantages)
            tied = tied & ~all_zero
        counts = action_counts.double()
        divisors = {
            "sample_mean": len(rewards) * counts,
            "token_mean": counts.sum().expand_as(counts),
            "sequence_sum": torch.full_like(counts, len(rewards) * settings.sequence_constant),
        }
        weights = (1 / divisors[settings.aggregation]).to(dtype)
        return advantages, torch.where(tied, 0, weights) if settings.skip_tied_groups else weights

    def gate(self, logprobs: Tensor, batch: TokenBatch) -> Gate:
        """Keep every action token; count what is clipped, and the mean ratio as a sum over action tokens.

        Raises:
            ValueError: on an action token a log-prob > 0 or not finite, of either policy; a ratio that enters the loss
                unclipped and overflows float32.
        """
        check_logprobs(batch, logprobs=logprobs, behavior_logprobs=batch.behavior_logprobs)
        mask, advantages = batch.action_mask, on_action_tokens(batch.advantages_at(), batch)
        difference = on_action_tokens(logprobs, batch) - on_action_tokens(batch.behavior_logprobs, batch)
        ratio = torch.where(mask, difference, -math.inf).exp()
        clipped = self._clipped(ratio, advantages)
        check_ratios("the ratio to the behavior policy", difference, ~clipped & (advantages != 0), batch.row)
        stats = mismatch_stats(difference, batch) | {
            "rows": counted_once(batch, (trajectory_sums(batch, mask) > 0).sum()),
            "retained_tokens": scalar(mask.sum()),
            "clipped_tokens": scalar(clipped.sum()),
            "ratio": scalar(ratio.sum()),
            "ratio_max": largest(ratio),
        }
        return Gate(mask, stats)

    def token_loss(self, logprobs: Tensor, batch: TokenBatch, keep: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        """The weighted clipped surrogate and its derivative; [n] each, 0 where not `keep`."""
        row, keep = batch.row[tokens], keep[tokens]
        advantages = torch.where(keep, batch.advantages_at(tokens), 0)
        # At advantage 0 the ratio may be anything, infinity too: it must not reach a product.
        difference = torch.where(advantages != 0, logprobs - batch.behavior_logprobs[tokens], 0)
        ratio = difference.exp()
        clipped = self._clipped(ratio, advantages)
        limited = ratio.clamp(1 - self.settings.clip_low, 1 + self.settings.clip_high)
        value = -advantages * torch.where(clipped, limited, ratio)
        derivative = torch.where(clipped, 0, value)
        weights = batch.token_weights[row]
        return (weights * value).to(logprobs.dtype), (weights * derivative).to(logprobs.dtype)

    def _clipped(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Where the minimum takes the clipped term, which has no gradient."""
        above = (advantages > 0) & (ratio > 1 + self.settings.clip_high)
        below = (advantages < 0) & (ratio < 1 - self.settings.clip_low)
        return above | below


def grpo_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    rewards: Tensor,
    action_mask: Tensor,
    groups: Tensor,
    *,
    reference_logprobs: Tensor | None = None,
    kl_coefficient: float = 0.0,
    **settings: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The GRPO loss (Shao et al. 2024) of a whole batch of B trajectories, padded to T tokens.

    Args:
        logprobs: [B, T], of the current policy, with grad; float64 is kept, anything else is computed in float32.
        behavior_logprobs: [B, T], the sampler's.
        rewards: [B].
        action_mask: bool [B, T], True on the tokens that the policy sampled; other positions may hold anything.
        groups: int64 [B], equal for the rollouts of one prompt.
        reference_logprobs: [B, T], needed with kl_coefficient > 0.
        kl_coefficient: of k3 to the reference.
        settings: fields of `GrpoSettings`, say `clip_high=0.28, aggregation="token_mean"`.

    Returns:
        (loss, stats): a scalar; and detached `advantages` [B], and scalars: `policy_tokens`, `retained_tokens`,
        `clipped_fraction`, `ratio_mean`, `ratio_max`, `extreme_tokens`, and `kl_mean` where there is a reference.

    Raises:
        ValueError: shapes or dtypes that do not fit, a setting out of range, a trajectory without action tokens, a
            group of one, a reward that is not finite, a log-prob > 0 or not finite on an action token, a ratio
            that overflows.
    """
    check_number("kl_coefficient", kl_coefficient, 0, _LARGEST)
    plain = Grpo(GrpoSettings(**settings))
    algorithm = plain if kl_coefficient == 0 else WithKl(plain)
    loss, advantages, gate = padded_loss(
        algorithm,
        logprobs,
        behavior_logprobs,
        rewards,
        action_mask,
        groups,
        kl_coefficient=kl_coefficient,
        reference_logprobs=reference_logprobs,
    )
    means = {"clipped_tokens": "clipped_fraction", "ratio": "ratio_mean", "kl": "kl_mean"}
    scalars = ("policy_tokens", "retained_tokens", "extreme_tokens", "ratio_max")
    return loss, {
        "advantages": advantages,
        **{name: gate.stats[name] for name in scalars},
        **{mean: gate.stats[name] / gate.stats["policy_tokens"] for name, mean in means.items() if name in gate.stats},
    }
