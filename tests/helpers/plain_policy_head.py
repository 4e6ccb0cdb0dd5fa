"""The same functions as plain formulas over full logits, on one rank: what the fused ones are held against.

Legend: T = tokens, H = hidden size, V = vocabulary rows, padding included.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int | None = None,
    temperature: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies), each `[T]`, of `targets` int64 `[T]` under softmax(hidden @ weight^T / temperature).

    The product runs in the dtype of `hidden` `[T, H]` and `weight` `[V, H]`; the softmax in fp32, or fp64 for fp64.
    Rows of `weight` from `vocab_size` on are padding. Autograd gives the gradients.
    """
    logits = hidden @ weight[:vocab_size].t()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / _column(temperature)
    all_logprobs = torch.log_softmax(logits, -1)
    entropies = -(all_logprobs.exp() * all_logprobs).sum(-1)
    return all_logprobs.gather(1, targets[:, None]).squeeze(1), entropies


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    loss: Callable[[Tensor, slice], tuple[Tensor, Tensor]],
    *,
    vocab_size: int | None = None,
    temperature: float | Tensor = 1.0,
    entropy_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(the sum of `loss`, log-probs): the gradient is that of sum(derivative * logprob), `loss`'s own derivative."""
    logprobs, entropies = linear_logprob(hidden, weight, targets, vocab_size=vocab_size, temperature=temperature)
    value, derivative = loss(logprobs.detach(), slice(0, targets.numel()))
    live = derivative != 0
    surrogate = torch.where(live, derivative * logprobs, 0).sum()
    total = value.sum() + surrogate - surrogate.detach()
    if entropy_weight is not None:
        total = total + (entropy_weight * entropies).sum()
    return total, logprobs.detach()


def _column(temperature: float | Tensor) -> float | Tensor:
    return temperature[:, None] if isinstance(temperature, Tensor) else temperature
