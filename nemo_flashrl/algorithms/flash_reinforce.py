"""FlashREINFORCE: one rollout per prompt, a batch-mean baseline, a gate over whole trajectories.

FlashREINFORCE, NVIDIA, September 2026; over the B trajectories of a batch, T_i action tokens in trajectory i:

    A_i  = R_i - mean_j R_j
    rho  = exp(sg(logp) - logmu)                               not clipped
    p,q  = exp(logmu), exp(sg(logp))  clamped to [1e-6, 1-1e-6]
    D_i  = max(0, mean_t [ p ln(p/q) + (1-p) ln((1-p)/(1-q)) ])
    m_i  = 1[D_i <= delta]
    L    = -(1/B) sum_i (m_i A_i / T_i) sum_t rho_t logp_t

Rejected trajectories stay in B, filtered tokens stay in T_i.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from nemo_flashrl.algorithms.algorithm import Gate, TokenBatch
from nemo_flashrl.algorithms.policy_loss import padded_loss
from nemo_flashrl.algorithms.tokens import (
    EXTREME_NATS,
    check_batch,
    check_finite,
    check_logprobs,
    check_number,
    check_ratios,
    counted_once,
    largest,
    mismatch_stats,
    places_in_trajectory,
    scalar,
    trajectory_sums,
    working_dtype,
)

_PROBABILITY_FLOOR = 1e-6
# float32 log-probs are this far apart near 10 nats: a smaller difference is rounding, and its divergence counts 0.
_LOGPROB_RESOLUTION = 1e-6


@dataclass(frozen=True, slots=True)
class FlashReinforceSettings:
    """What a user may set; a ValueError names the field, its value and the right range."""

    delta: float = 3e-3  # a trajectory whose mean divergence exceeds it is rejected; inf switches the gate off
    importance_sampling: bool = True  # False: the ratio in the loss is 1
    negative_token_fraction: float = 1.0  # of a failed trajectory's tokens, the highest-entropy ones that are kept
    ratio_guard: float = EXTREME_NATS  # nats; drops a trajectory with a token beyond it; inf switches the guard off

    def __post_init__(self) -> None:
        check_number("delta", self.delta, 0, math.inf)
        check_number("negative_token_fraction", self.negative_token_fraction, 0, 1)
        check_number("ratio_guard", self.ratio_guard, 0, math.inf)


class FlashReinforce:
    """The `Algorithm` of FlashREINFORCE (NVIDIA, September 2026); float64 inputs are computed in float64."""

    Settings = FlashReinforceSettings
    needs_reference = False
    group_size = 1

    def __init__(self, settings: FlashReinforceSettings = FlashReinforceSettings()) -> None:
        self.settings = settings
        self.needs_entropy = settings.negative_token_fraction < 1
        thresholds = (settings.delta, settings.ratio_guard)
        self.gates_trajectories = self.needs_entropy or any(math.isfinite(limit) for limit in thresholds)

    def weigh(self, rewards: Tensor, action_counts: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
        """A_i = R_i - mean R and 1 / (B T_i), float32 [B] each, over the whole batch; `groups` are not looked at.

        Raises:
            ValueError: an empty batch, a reward that is not finite, a trajectory without action tokens.
        """
        dtype = working_dtype(rewards)
        rewards = rewards.to(dtype)
        check_batch(rewards, action_counts)
        precise = rewards.double()
        advantages = precise - precise.mean()
        # Equal rewards: the mean is rounded, 7 x 0.1 / 7 != 0.1, and noise of 1e-17 would be trained on.
        if bool((rewards == rewards[0]).all()):
            advantages = torch.zeros_like(precise)
        return advantages.to(dtype), (1 / (len(rewards) * action_counts.double())).to(dtype)

    def gate(self, logprobs: Tensor, batch: TokenBatch) -> Gate:
        """Admit whole trajectories by D_i <= delta and the ratio guard, then filter failed ones by entropy.

        Rows without action tokens are padding and count nowhere. `per_row` holds `sequence_kl` [R] (D_i),
        `admitted` and `guarded` bool [R]. In `stats`, a rejection by D is rows - admitted - guarded.

        Raises:
            ValueError: on an action token a log-prob > 0 or not finite; a ratio in use that overflows float32;
                entropies missing or not finite where they are needed.
        """
        check_logprobs("logprobs", logprobs, batch)
        check_logprobs("behavior_logprobs", batch.behavior_logprobs, batch)
        mask, row = batch.action_mask, batch.row[batch.action_mask]
        current, sampled = logprobs[mask].double(), batch.behavior_logprobs[mask].double()
        difference = current - sampled
        extreme = difference.abs() > self.settings.ratio_guard
        action_counts, divergence, num_extreme = trajectory_sums(
            batch, torch.ones_like(current), _bernoulli_kl(sampled, current), extreme
        )
        sequence_kl = (divergence / action_counts.clamp(min=1)).clamp(min=0).to(logprobs.dtype)
        guarded = num_extreme > 0
        admitted = (action_counts > 0) & ~guarded & (sequence_kl <= self.settings.delta)
        admitted_tokens = admitted[row]
        retained = admitted_tokens & self._filter(batch, row, action_counts.long())
        if self.settings.importance_sampling:
            used = retained & ((batch.advantages * batch.token_weights)[row] != 0)
            check_ratios("the ratio to the behavior policy", difference, used, row)
        ratio = difference[admitted_tokens].exp()
        stats = mismatch_stats(difference) | {
            "rows": counted_once(batch, (action_counts > 0).sum()),
            "admitted": counted_once(batch, admitted.sum()),
            "guarded": counted_once(batch, guarded.sum()),
            "sequence_kl": counted_once(batch, sequence_kl.sum()),
            "admitted_tokens": scalar(admitted_tokens.sum()),
            "retained_tokens": scalar(retained.sum()),
            "ratio": scalar(ratio.sum()),
            "ratio_max": largest(ratio),
        }
        keep = torch.zeros_like(mask).masked_scatter(mask, retained)
        return Gate(keep, stats, {"sequence_kl": sequence_kl, "admitted": admitted, "guarded": guarded})

    def token_loss(self, logprobs: Tensor, batch: TokenBatch, keep: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        """-w A rho logp and its derivative -w A rho, as the ratio is not differentiated; [n], 0 where not `keep`."""
        row = batch.row[tokens]
        coefficient = batch.token_weights[row] * batch.advantages[row]
        used = keep[tokens] & (coefficient != 0)
        current = torch.where(used, logprobs, 0)
        derivative = torch.where(used, -coefficient, 0)
        if self.settings.importance_sampling:
            derivative = derivative * torch.exp(current - torch.where(used, batch.behavior_logprobs[tokens], 0))
        derivative = derivative.to(logprobs.dtype)
        return derivative * current, derivative

    def _filter(self, batch: TokenBatch, row: Tensor, action_counts: Tensor) -> Tensor:
        """bool [A]: False on the tokens of failed trajectories below the ceil(q T_i) highest entropies."""
        if not self.needs_entropy:
            return torch.ones_like(row, dtype=torch.bool)
        if batch.entropies is None:
            raise ValueError(
                f"negative_token_fraction = {self.settings.negative_token_fraction} needs the tokens' entropies"
            )
        check_finite("entropies", batch.entropies, batch)
        # As a fraction: in floating point 0.28 * 25 = 7.000000000000001, whose ceiling is 8.
        fraction = Fraction(self.settings.negative_token_fraction).limit_denominator(10**9)
        limits = -((-fraction.numerator * action_counts) // fraction.denominator)
        return ~batch.failures[row] | (places_in_trajectory(batch, batch.entropies) < limits[row])


def _bernoulli_kl(behavior_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """KL(Bernoulli(p) || Bernoulli(q)) per token; float64, or the terms, that cancel, leave noise of 1e-8."""
    p = behavior_logprobs.exp().clamp(_PROBABILITY_FLOOR, 1 - _PROBABILITY_FLOOR)
    q = logprobs.exp().clamp(_PROBABILITY_FLOOR, 1 - _PROBABILITY_FLOOR)
    divergence = p * torch.log(p / q) + (1 - p) * torch.log((1 - p) / (1 - q))
    return torch.where((logprobs - behavior_logprobs).abs() > _LOGPROB_RESOLUTION, divergence, 0)


def flash_reinforce_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    rewards: Tensor,
    action_mask: Tensor,
    *,
    delta: float = 3e-3,
    negative_token_fraction: float = 1.0,
    entropies: Tensor | None = None,
    failures: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The FlashREINFORCE loss (NVIDIA, September 2026) of a whole batch of B trajectories, padded to T tokens.

    >>> logprobs = torch.tensor([[-1.0], [-2.0]])
    >>> loss, stats = flash_reinforce_loss(logprobs, logprobs, torch.tensor([1.0, 0.0]), torch.ones(2, 1).bool())
    >>> loss.item()  # advantages 1/2 and -1/2: -(1/2) (1/2 * -1 + -1/2 * -2)
    -0.25

    Args:
        logprobs: [B, T], of the current policy, with grad; float64 is kept, anything else is computed in float32.
        behavior_logprobs: [B, T], the sampler's. A token more than 20 nats from it drops its trajectory.
        rewards: [B].
        action_mask: bool [B, T], True on the tokens that the policy sampled; other positions may hold anything.
        delta: the largest mean divergence of an admitted trajectory; inf switches the gate off.
        negative_token_fraction: keep only this share of a failed trajectory's tokens, those of the highest entropy.
        entropies: [B, T], needed with negative_token_fraction < 1.
        failures: bool [B], which trajectories failed; needed with negative_token_fraction < 1.

    Returns:
        (loss, stats): a scalar; and detached `advantages`, `sequence_kl` [B], `admitted`, `guarded` bool [B], and
        scalars: `acceptance_rate`, `policy_tokens` (action tokens), `retained_tokens` (those in the loss),
        `ratio_mean` and `ratio_max` over admitted trajectories, `extreme_tokens` (beyond 20 nats).

    Raises:
        ValueError: shapes or dtypes that do not fit, a setting out of range, a trajectory without action tokens, a
            reward that is not finite, a log-prob > 0 or not finite on an action token.
    """
    algorithm = FlashReinforce(FlashReinforceSettings(delta=delta, negative_token_fraction=negative_token_fraction))
    if algorithm.needs_entropy and failures is None:
        raise ValueError(f"negative_token_fraction = {negative_token_fraction} needs `failures`: which ones failed")
    groups = torch.arange(len(logprobs), device=logprobs.device)
    loss, advantages, gate = padded_loss(
        algorithm, logprobs, behavior_logprobs, rewards, action_mask, groups, failures, entropies=entropies
    )
    scalars = ("policy_tokens", "retained_tokens", "extreme_tokens", "ratio_max")
    return loss, {
        "advantages": advantages,
        **gate.per_row,
        "acceptance_rate": gate.stats["admitted"] / len(advantages),
        "ratio_mean": gate.stats["ratio"] / gate.stats["admitted_tokens"].clamp(min=1),
        **{name: gate.stats[name] for name in scalars},
    }
