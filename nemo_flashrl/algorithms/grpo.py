"""GRPO: groups of rollouts of one prompt, advantages within the group, a clipped surrogate.

Shao et al. 2024 (DeepSeekMath) for the group advantage, Schulman et al. 2017 for the clipped surrogate; `kl.py` adds
the KL to a reference:

    A_i     = (R_i - mean) / (std + epsilon)        over the group; std unbiased, divided by G - 1
    rho     = exp(logp - logmu)                     against the policy that sampled: one step per batch
    loss_t  = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_flashrl.algorithms.algorithm import Gate, TokenBatch
from nemo_flashrl.algorithms.kl import WithKl
from nemo_flashrl.algorithms.policy_loss import padded_loss
from nemo_flashrl.algorithms.tokens import (
    check_batch,
    check_logprobs,
    check_number,
    check_ratios,
    counted_once,
    largest,
    mismatch_stats,
    scalar,
    trajectory_sums,
    working_dtype,
)

AGGREGATIONS = ("sample_mean", "token_mean", "sequence_sum")


@dataclass(frozen=True, slots=True)
class GrpoSettings:
    """What a user may set; a ValueError names the field, its value and the right range."""

    group_size: int = 8  # rollouts per prompt
    clip_low: float = 0.2
    clip_high: float = 0.2  # inf: no upper clip
    aggregation: str = "sample_mean"  # mean over a trajectory's tokens, then over trajectories; or as in AGGREGATIONS
    advantage_epsilon: float = 1e-6  # added to the standard deviation

    def __post_init__(self) -> None:
        if not isinstance(self.group_size, int) or self.group_size < 2:
            raise ValueError(
                f"group_size = {self.group_size!r}: must be an integer of at least 2, as an advantage compares"
                " rollouts of one prompt"
            )
        check_number("clip_low", self.clip_low, 0, 1)
        check_number("clip_high", self.clip_high, 0, math.inf)
        check_number("advantage_epsilon", self.advantage_epsilon, 0, torch.finfo(torch.float32).max)
        if self.aggregation not in AGGREGATIONS:
            raise ValueError(f"aggregation = {self.aggregation!r}: must be one of {', '.join(AGGREGATIONS)}")


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

        The weight is 1 / (B T_i) for `sample_mean`, 1 / sum_j T_j for `token_mean`, 1 / B for `sequence_sum`.

        Raises:
            ValueError: an empty batch, a reward that is not finite, a trajectory without action tokens, a group of one.
        """
        dtype = working_dtype(rewards)
        check_batch(rewards.to(dtype), action_counts)
        advantages = group_advantages(rewards, groups, epsilon=self.settings.advantage_epsilon)
        counts = action_counts.double()
        divisors = {
            "sample_mean": len(rewards) * counts,
            "token_mean": counts.sum().expand_as(counts),
            "sequence_sum": torch.full_like(counts, len(rewards)),
        }
        return advantages, (1 / divisors[self.settings.aggregation]).to(dtype)

    def gate(self, logprobs: Tensor, batch: TokenBatch) -> Gate:
        """Keep every action token; count what is clipped, and the mean ratio as a sum over action tokens.

        Raises:
            ValueError: on an action token a log-prob > 0 or not finite, of either policy; a ratio that enters the loss
                unclipped and overflows float32.
        """
        check_logprobs("logprobs", logprobs, batch)
        check_logprobs("behavior_logprobs", batch.behavior_logprobs, batch)
        mask, row = batch.action_mask, batch.row[batch.action_mask]
        current, advantages = logprobs[mask].double(), batch.advantages[row].double()
        difference = current - batch.behavior_logprobs[mask].double()
        ratio = difference.exp()
        clipped = self._clipped(ratio, advantages)
        check_ratios("the ratio to the behavior policy", difference, ~clipped & (advantages != 0), row)
        stats = mismatch_stats(difference) | {
            "rows": counted_once(batch, (trajectory_sums(batch, torch.ones_like(current)) > 0).sum()),
            "retained_tokens": scalar(mask.sum()),
            "clipped_tokens": scalar(clipped.sum()),
            "ratio": scalar(ratio.sum()),
            "ratio_max": largest(ratio),
        }
        return Gate(mask, stats)

    def token_loss(self, logprobs: Tensor, batch: TokenBatch, keep: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        """The weighted clipped surrogate and its derivative; [n] each, 0 where not `keep`."""
        row, keep = batch.row[tokens], keep[tokens]
        advantages = torch.where(keep, batch.advantages[row], 0)
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


def group_advantages(rewards: Tensor, groups: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    """(R_i - mean) / (std + epsilon) within each group (Shao et al. 2024), std unbiased: divided by G - 1.

    A group of equal rewards has advantage exactly 0.

    >>> group_advantages(torch.tensor([1.0, 0.0, 5.0, 5.0]), torch.tensor([7, 7, 3, 3]), epsilon=0.0)
    tensor([ 0.7071, -0.7071,  0.0000,  0.0000])

    Args:
        rewards: [B], finite.
        groups: int64 [B], equal for the rollouts of one prompt; any numbers, in any order.
        epsilon: added to the standard deviation.

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
    centred = precise - (zeros.index_add(0, group, precise) / counts)[group]
    std = (zeros.index_add(0, group, centred.square()) / (counts - 1)).sqrt()
    lowest = zeros.scatter_reduce(0, group, precise, "amin", include_self=False)
    highest = zeros.scatter_reduce(0, group, precise, "amax", include_self=False)
    # The mean of equal rewards is rounded: without this, noise over noise would be an advantage of order 1.
    advantages = torch.where((lowest == highest)[group], 0, centred / (std[group] + epsilon))
    return advantages.to(working_dtype(rewards))


def grpo_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    rewards: Tensor,
    action_mask: Tensor,
    groups: Tensor,
    *,
    reference_logprobs: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.0,
    aggregation: str = "sample_mean",
    advantage_epsilon: float = 1e-6,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The GRPO loss (Shao et al. 2024) of a whole batch of B trajectories, padded to T tokens.

    Args:
        logprobs: [B, T], of the current policy, with grad; float64 is kept, anything else is computed in float32.
        behavior_logprobs: [B, T], the sampler's.
        rewards: [B].
        action_mask: bool [B, T], True on the tokens that the policy sampled; other positions may hold anything.
        groups: int64 [B], equal for the rollouts of one prompt.
        reference_logprobs: [B, T], needed with kl_coefficient > 0.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        kl_coefficient: of k3 to the reference.
        aggregation: "sample_mean", "token_mean" or "sequence_sum", see `Grpo.weigh`.
        advantage_epsilon: added to the standard deviation of a group.

    Returns:
        (loss, stats): a scalar; and detached `advantages` [B], and scalars: `policy_tokens`, `retained_tokens`,
        `clipped_fraction`, `ratio_mean`, `ratio_max`, `extreme_tokens`, and `kl_mean` where there is a reference.

    Raises:
        ValueError: shapes or dtypes that do not fit, a setting out of range, a trajectory without action tokens, a
            group of one, a reward that is not finite, a log-prob > 0 or not finite on an action token, a ratio
            that overflows.
    """
    settings = GrpoSettings(
        clip_low=clip_low, clip_high=clip_high, aggregation=aggregation, advantage_epsilon=advantage_epsilon
    )
    check_number("kl_coefficient", kl_coefficient, 0, torch.finfo(torch.float32).max)
    algorithm = Grpo(settings) if kl_coefficient == 0 else WithKl(Grpo(settings))
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
