"""KL divergence from a reference policy, estimated per sampled token, for any algorithm.

With d = logp - logref at the token that was sampled, k1, k2, k3 of Schulman, "Approximating KL Divergence" (2020):

    estimator           value           as a term of the loss: its derivative by logp
    k1                  d               1
    k2                  d^2 / 2         d
    k3                  e^-d - 1 + d    1 - e^-d

For tokens sampled from the policy p, and r the reference, the expectation of (derivative * grad logp) is

    k1    E[grad logp] = 0: noise, nothing is pulled towards the reference
    k2    E[d grad logp] = grad KL(p || r): right, although the value of k2 is biased
    k3    -E_r[grad logp] = grad KL(r || p): biased for KL(p || r), as it is the gradient of the reverse divergence,
          which has the same minimum; the value of k3 is unbiased

In the reward there is no derivative: coefficient times the mean of k over the trajectory's action tokens is taken off
what it has earned, k1 and k3 are unbiased there, and the policy gradient does the rest. The mean, not the sum: the
coefficient then has one meaning in both places, and a long trajectory pays no more than a short one.

The tokens' distribution is taken as the policy's: the ratio to the sampler does not enter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nemo_flashrl.algorithms.algorithm import Algorithm, Gate, TokenBatch
from nemo_flashrl.algorithms.tokens import check_finite, check_logprobs, check_ratios, on_action_tokens, scalar

ESTIMATORS = ("k3", "k1", "k2")


def kl_estimate(estimator: str, logprobs: Tensor, reference_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """(value, d value / d logprob) per token, as in the table above; any shape, the dtype of the inputs.

    >>> kl_estimate("k3", torch.tensor([-1.0]), torch.tensor([-1.0 + math.log(2)]))  # 2 - ln 2 - 1, 1 - 2
    (tensor([0.3069]), tensor([-1.]))
    """
    difference = logprobs - reference_logprobs
    if estimator == "k1":
        return difference, torch.ones_like(difference)
    if estimator == "k2":
        return difference.square() / 2, difference
    assert estimator == "k3", estimator
    growth = torch.expm1(-difference)
    return growth + difference, -growth


class WithKl:
    """Another algorithm, plus `batch.kl_coefficient` times the KL estimate in the loss of every token that it keeps.

    A token that the gate rejects was sampled by another policy than the estimate assumes: it has no part in the loss,
    as it has none in the policy gradient. The metric `kl` is over all action tokens. The term has the token's weight.

    Args:
        algorithm: whose loss it is added to; everything else is asked of it.
        estimator: "k1", "k2" or "k3".
        watch_entropy: report the policy's entropy, which a schedule of the coefficient may follow.
    """

    needs_reference = True

    def __init__(self, algorithm: Algorithm, estimator: str = "k3", *, watch_entropy: bool = False) -> None:
        if estimator not in ESTIMATORS:
            raise ValueError(f"kl.estimator={estimator!r}: must be one of {', '.join(ESTIMATORS)}")
        self.algorithm = algorithm
        self.estimator = estimator
        self.needs_entropy = watch_entropy or algorithm.needs_entropy

    def __getattr__(self, name: str) -> Any:
        if name == "algorithm":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.algorithm, name)

    def gate(self, logprobs: Tensor, batch: TokenBatch) -> Gate:
        """The algorithm's gate; its `stats` with `kl`, and `entropy` where it is known, summed over action tokens.

        Raises:
            ValueError: as the algorithm; log-probs of the reference missing, > 0 or not finite on an action token; a
                ratio of the reference that enters the loss and overflows.
        """
        if batch.reference_logprobs is None:
            raise ValueError(f"kl_coefficient = {batch.kl_coefficient} needs reference_logprobs")
        check_logprobs(batch, reference_logprobs=batch.reference_logprobs)
        decided = self.algorithm.gate(logprobs, batch)
        current, reference = (on_action_tokens(values, batch) for values in (logprobs, batch.reference_logprobs))
        if self.estimator == "k3" and batch.kl_coefficient > 0:
            check_ratios("the ratio of the reference", reference - current, decided.keep, batch.row)
        # Where both are 0, every estimate is.
        stats = {"kl": scalar(kl_estimate(self.estimator, current, reference)[0].sum())}
        if batch.entropies is not None:
            check_finite("entropies", batch.entropies, batch)
            stats["entropy"] = scalar(on_action_tokens(batch.entropies, batch).sum())
        return replace(decided, stats=stats | decided.stats)

    def token_loss(self, logprobs: Tensor, batch: TokenBatch, keep: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        """The algorithm's, plus the weighted KL estimate and its derivative; [n] each, 0 where not `keep`."""
        value, derivative = self.algorithm.token_loss(logprobs, batch, keep, tokens)
        if batch.kl_coefficient == 0:
            return value, derivative
        used = keep[tokens]
        reference = torch.where(used, batch.reference_logprobs[tokens], 0)
        divergence, slope = kl_estimate(self.estimator, torch.where(used, logprobs, 0), reference)
        weights = torch.where(used, batch.kl_coefficient * batch.token_weights[batch.row[tokens]], 0)
        return value + (weights * divergence).to(value.dtype), derivative + (weights * slope).to(value.dtype)
