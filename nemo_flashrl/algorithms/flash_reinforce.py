"""FlashREINFORCE: one rollout per prompt, a batch-mean baseline, a gate over whole trajectories.

FlashREINFORCE, NVIDIA, September 2026; over the B trajectories of a batch, T_i action tokens in trajectory i:

    A_i  = R_i - mean_j R_j
    rho  = exp(sg(logp) - logmu)                               not clipped
    p,q  = exp(logmu), exp(sg(logp))  clamped to [1e-6, 1-1e-6]
    D_i  = max(0, mean_t [ p ln(p/q) + (1-p) ln((1-p)/(1-q)) ])
    m_i  = 1[D_i <= delta]
    L    = -(1/B) sum_i (m_i A_i / T_i) sum_t rho_t logp_t

Rejected trajectories stay in B, filtered tokens stay in T_i.

Beyond the paper, each a setting and off by default (W: the mean rewards of the last batches, their mean):

    baseline            "window": A_i = R_i - W; "both": A_i = R_i - (mean_j R_j + W) / 2
    normalise           A_i / (sqrt(mean_j A_j^2) + 1e-6); with the batch's baseline the root is the rewards' std
    ratio_clip = c      rho clamped to [1 - c, 1 + c]; it has no derivative, so that a clipped token is trained on too
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from nemo_flashrl.algorithms.algorithm import Gate, TokenBatch
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
    on_action_tokens,
    places_in_trajectory,
    scalar,
    trajectory_sums,
    working_dtype,
)
from nemo_flashrl.algorithms.unfused_loss import padded_loss

_PROBABILITY_FLOOR = 1e-6
_STD_EPSILON = 1e-6
# float32 log-probs are this far apart near 10 nats: a smaller difference is rounding, and its divergence counts 0.
_LOGPROB_RESOLUTION = 1e-6
BASELINES = ("batch", "window", "both")


@dataclass(frozen=True, slots=True)
class FlashReinforceSettings:
    """What a user may set; a ValueError names the field, its value and the right range."""

    delta: float = 3e-3  # a trajectory whose mean divergence exceeds it is rejected; inf: no gate
    importance_sampling: bool = True  # False: the importance ratio in the loss is 1
    negative_token_fraction: float = 1.0  # share of a failed trajectory's tokens that is kept, highest entropy first
    ratio_guard: float = EXTREME_NATS  # nats; drops a trajectory with a token beyond it; inf: no guard
    baseline: str = "batch"  # batch | window | both: mean reward of this batch, of those before it, or half and half
    baseline_window: int = 8  # batches before this one that count; the first batch has its own mean
    normalise: bool = False  # True: advantages are divided by their root mean square over the batch
    ratio_clip: float = math.inf  # clip range of the importance ratio in the loss; inf: no clip

    def __post_init__(self) -> None:
        if self.baseline not in BASELINES:
            raise ValueError(f"baseline = {self.baseline!r}: must be one of {', '.join(BASELINES)}")
        if not isinstance(self.baseline_window, int) or self.baseline_window < 1:
            raise ValueError(f"baseline_window = {self.baseline_window!r}: must be an integer of at least 1")
        check_number("ratio_clip", self.ratio_clip, 0, math.inf)
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
        self._past: deque[float] = deque(maxlen=settings.baseline_window)  # mean rewards of earlier batches
        self._newest: float | None = None  # of the batch that was weighed last

    def next_batch(self) -> None:
        """What is weighed from now on is another batch than before."""
        if self._newest is not None:
            self._past.append(self._newest)
        self._newest = None

    def state_dict(self) -> dict[str, Any]:
        """The window of baselines."""
        return {"past": list(self._past), "newest": self._newest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved window."""
        self._past = deque(state["past"], maxlen=self.settings.baseline_window)
        self._newest = state["newest"]

    def weigh(self, rewards: Tensor, action_counts: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
        """A_i = R_i - baseline and 1 / (B T_i), float32 [B] each, over the whole batch; `groups` are not looked at.

        Until `next_batch`, a second call is taken for the same batch with other rewards.

        Raises:
            ValueError: an empty batch, a reward that is not finite, a trajectory without action tokens.
        """
        dtype = working_dtype(rewards)
        rewards = rewards.to(dtype)
        check_batch(rewards, action_counts)
        precise = rewards.double()
        # Equal rewards: the mean is rounded, 7 x 0.1 / 7 != 0.1, and noise of 1e-17 would be trained on.
        mean = precise[0] if bool((rewards == rewards[0]).all()) else precise.mean()
        self._newest = float(mean)
        window = sum(self._past) / len(self._past) if self._past else mean
        baseline = {"batch": mean, "window": window, "both": (mean + window) / 2}[self.settings.baseline]
        advantages = precise - baseline
        if self.settings.normalise:
            advantages = advantages / (advantages.square().mean().sqrt() + _STD_EPSILON)
        return advantages.to(dtype), (1 / (len(rewards) * action_counts.double())).to(dtype)

    def gate(self, logprobs: Tensor, batch: TokenBatch) -> Gate:
        """Admit whole trajectories by D_i <= delta and the ratio guard, then filter failed ones by entropy.

        Rows without action tokens are padding and count nowhere. `per_row` holds `sequence_kl` [R] (D_i),
        `admitted` and `guarded` bool [R]. In `stats`, a rejection by D is rows - admitted - guarded.

        Raises:
            ValueError: on an action token a log-prob > 0 or not finite; a ratio in use that overflows float32;
                entropies missing or not finite where they are needed.
        """
        check_logprobs(batch, logprobs=logprobs, behavior_logprobs=batch.behavior_logprobs)
        mask, row = batch.action_mask, batch.row
        current, sampled = (on_action_tokens(values, batch) for values in (logprobs, batch.behavior_logprobs))
        difference = current - sampled
        extreme = difference.abs() > self.settings.ratio_guard
        action_counts, divergence, num_extreme = trajectory_sums(batch, mask, _bernoulli_kl(sampled, current), extreme)
        sequence_kl = (divergence / action_counts.clamp(min=1)).clamp(min=0).to(logprobs.dtype)
        guarded = num_extreme > 0
        admitted = (action_counts > 0) & ~guarded & (sequence_kl <= self.settings.delta)
        admitted_tokens = mask & admitted[row]
        retained = admitted_tokens & self._filter(batch, action_counts.long())
        if self.settings.importance_sampling and math.isinf(self.settings.ratio_clip):
            used = retained & (batch.advantages_at() * batch.token_weights[row] != 0)
            check_ratios("the ratio to the behavior policy", difference, used, row)
        ratio = torch.where(admitted_tokens, difference, -math.inf).exp()
        stats = mismatch_stats(difference, batch) | {
            "rows": counted_once(batch, (action_counts > 0).sum()),
            "admitted": counted_once(batch, admitted.sum()),
            "guarded": counted_once(batch, guarded.sum()),
            "sequence_kl": counted_once(batch, sequence_kl.sum()),
            "admitted_tokens": scalar(admitted_tokens.sum()),
            "retained_tokens": scalar(retained.sum()),
            "ratio": scalar(ratio.sum()),
            "ratio_max": largest(ratio),
        }
        if self.settings.importance_sampling and not math.isinf(self.settings.ratio_clip):
            outside = (difference.exp() - 1).abs() > self.settings.ratio_clip
            stats["clipped_tokens"] = scalar((retained & outside).sum())
        return Gate(retained, stats, {"sequence_kl": sequence_kl, "admitted": admitted, "guarded": guarded})

    def token_loss(self, logprobs: Tensor, batch: TokenBatch, keep: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        """-w A rho logp and its derivative -w A rho, as the ratio is not differentiated; [n], 0 where not `keep`."""
        coefficient = batch.token_weights[batch.row[tokens]] * batch.advantages_at(tokens)
        used = keep[tokens] & (coefficient != 0)
        current = torch.where(used, logprobs, 0)
        derivative = torch.where(used, -coefficient, 0)
        if self.settings.importance_sampling:
            ratio = torch.exp(current - torch.where(used, batch.behavior_logprobs[tokens], 0))
            derivative = derivative * ratio.clamp(1 - self.settings.ratio_clip, 1 + self.settings.ratio_clip)
        derivative = derivative.to(logprobs.dtype)
        return derivative * current, derivative

    def _filter(self, batch: TokenBatch, action_counts: Tensor) -> Tensor:
        """bool [N]: False on the action tokens of failed trajectories below the ceil(q T_i) highest entropies."""
        if not self.needs_entropy:
            return torch.ones_like(batch.action_mask)
        if batch.entropies is None:
            raise ValueError(
                f"negative_token_fraction = {self.settings.negative_token_fraction} needs the tokens' entropies"
            )
        check_finite("entropies", batch.entropies, batch)
        # As a fraction: in floating point 0.28 * 25 = 7.000000000000001, whose ceiling is 8.
        fraction = Fraction(self.settings.negative_token_fraction).limit_denominator(10**9)
        limits = -((-fraction.numerator * action_counts) // fraction.denominator)
        return ~batch.failures[batch.row] | (places_in_trajectory(batch, batch.entropies) < limits[batch.row])


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
        delta: the largest mean divergence of an admitted trajectory; inf: no gate.
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
