"""From an algorithm to a differentiable loss: gate, then per-token loss, then one scalar.

    logprobs [N] --detach--> gate --keep [N]--> token_loss --(value, d value / d logprob)--> sum, with that derivative

For log-probs that carry a graph. The fused policy head calls `gate` and `token_loss` itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nemo_flashrl.algorithms.algorithm import Algorithm, Gate, TokenBatch
from nemo_flashrl.algorithms.tokens import scalar, working_dtype


def policy_loss(algorithm: Algorithm, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """One microbatch's share of the loss, and its statistics.

    Args:
        algorithm: what decides and scores.
        logprobs: [N], of the current policy, with grad; float64 is kept, anything else is computed in float32.
        batch: the microbatch, N tokens of R trajectories.

    Returns:
        (loss, stats): the sum of the token values, whose gradient is the algorithm's derivative and exactly 0 at
        tokens that do not enter; and `Gate.stats` with `loss` added, to be reduced in the same way.

    Raises:
        ValueError: the algorithm refuses the log-probs.
    """
    loss, gate = _compose(algorithm, logprobs, batch)
    return loss, {**gate.stats, "loss": scalar(loss)}


def padded_loss(
    algorithm: Algorithm,
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    rewards: Tensor,
    action_mask: Tensor,
    groups: Tensor,
    failures: Tensor | None = None,
    *,
    kl_coefficient: float = 0.0,
    **token_fields: Tensor | None,
) -> tuple[Tensor, Tensor, Gate]:
    """A whole batch as a rectangle: `logprobs`, `behavior_logprobs`, `action_mask` [B, T], the rest [B].

    `token_fields` are further [B, T] fields of `TokenBatch`. Returns the loss, the advantages [B] and the gate.
    """
    token_fields = {name: value for name, value in token_fields.items() if value is not None}
    row_fields = {"rewards": rewards, "groups": groups} | ({} if failures is None else {"failures": failures})
    _check_shapes(logprobs, action_mask, {"behavior_logprobs": behavior_logprobs, **token_fields}, row_fields)
    count, length = logprobs.shape
    dtype = working_dtype(logprobs, rewards)
    advantages, token_weights = algorithm.weigh(rewards.detach().to(dtype), action_mask.sum(dim=1), groups)
    batch = TokenBatch(
        behavior_logprobs=behavior_logprobs.detach().to(dtype).flatten(),
        action_mask=action_mask.flatten(),
        row=torch.arange(count, device=logprobs.device).repeat_interleave(length),
        advantages=advantages,
        token_weights=token_weights,
        failures=advantages.new_zeros(count, dtype=torch.bool) if failures is None else failures,
        kl_coefficient=kl_coefficient,
        **{name: value.detach().to(dtype).flatten() for name, value in token_fields.items()},
    )
    loss, gate = _compose(algorithm, logprobs.flatten(), batch)
    return loss, advantages, gate


def _compose(algorithm: Algorithm, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Gate]:
    precise = logprobs.to(working_dtype(logprobs))
    current = precise.detach()
    gate = algorithm.gate(current, batch)
    value, derivative = algorithm.token_loss(current, batch, gate.keep, slice(0, len(current)))
    return _SumWithDerivative.apply(precise, value, derivative), gate


class _SumWithDerivative(torch.autograd.Function):
    """sum(value), with `derivative` as its gradient: no product with log-probs, which may be NaN where masked."""

    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, value: Tensor, derivative: Tensor) -> Tensor:
        ctx.save_for_backward(derivative)
        return value.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (derivative,) = ctx.saved_tensors
        return gradient * derivative, None, None


def _check_shapes(
    logprobs: Tensor, action_mask: Tensor, token_fields: dict[str, Tensor], row_fields: dict[str, Tensor]
) -> None:
    if logprobs.ndim != 2:
        raise ValueError(f"logprobs must be [B, T], got shape {tuple(logprobs.shape)}")
    for name, value in {"action_mask": action_mask, **token_fields}.items():
        if value.shape != logprobs.shape:
            raise ValueError(f"{name} must be [B, T] = {tuple(logprobs.shape)}, got shape {tuple(value.shape)}")
    for name, value in row_fields.items():
        if value.shape != logprobs.shape[:1]:
            raise ValueError(f"{name} must be [B] = {tuple(logprobs.shape[:1])}, got shape {tuple(value.shape)}")
    for name, value in {"action_mask": action_mask, "failures": row_fields.get("failures", action_mask)}.items():
        if value.dtype != torch.bool:
            raise ValueError(f"{name} must be bool, got {value.dtype}")
