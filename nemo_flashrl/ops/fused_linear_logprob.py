"""Per-token log-probs (and entropies) of an output layer, differentiable, without ever holding the logits.

Forward is one matrix product, backward three more over the rows that have a gradient: 1 + 3f products for a live share
f.

Legend: T = tokens, H = hidden size, V = vocabulary rows over all ranks, TP = tensor-parallel size.

    logprobs = fused_linear_logprob(hidden, weight, targets, vocab_size=515, temperature=0.7)
    (-(advantages * logprobs).sum()).backward()          # rows with advantage 0 cost nothing here
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .head import HeadOptions, lay_out, make_head
from .passes import GradientSums, TokenStatistics, gradient_pass, logprob_pass


def fused_linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    temperature: float | Tensor = 1.0,
    chunk_tokens: int | None = None,
    return_entropy: bool = False,
    mask: Tensor | None = None,
    sequence_parallel: bool = False,
    reduce_hidden_gradient: bool = True,
    grad_weight: Tensor | None = None,
    on_grad_weight: Callable[[], Tensor | None] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight^T / temperature) at `targets`.

    Args:
        hidden: `[T, H]`, fp64, fp32, bf16 or fp16; equal on all ranks of `tp_group`. With `sequence_parallel` this
            rank's `[T / TP, H]`, the tokens `[rank * T / TP, (rank + 1) * T / TP)`: gathered a chunk at a time, and the
            gradient reduce-scattered a chunk at a time.
        weight: this rank's rows `[V / TP, H]` in `hidden`'s dtype.
        targets: int64 `[T]`, vocabulary ids, all tokens on every rank.
        tp_group: the ranks that share the vocabulary; None for one rank.
        vocab_size: the true vocabulary; rows from there on are padding, with probability 0 and gradient 0.
        temperature: logits are divided by it; one for all tokens, or floating `[T]`, equal on all ranks.
        chunk_tokens: tokens whose logits are held at a time, `chunk_tokens * V / TP` fp32 numbers; None picks by device
            and shape, see `memory.picked_chunk_tokens`.
        return_entropy: also the entropy of each token's distribution, differentiable too.
        mask: bool `[T]`; rows outside it are never computed: log-prob and entropy 0, no gradient, their `hidden` and
            `targets` may hold anything. Equal on all ranks.
        reduce_hidden_gradient: False leaves each rank its own part of the gradient of `hidden`, for a caller that sums
            over `tp_group` itself. Under `sequence_parallel` it is always summed.
        grad_weight: fp32 (fp64) `[V / TP, H]`, for instance Megatron's `main_grad`: backward adds the gradient of
            `weight` there, and autograd is handed what `on_grad_weight()` returns, None by default.

    Returns:
        fp32 (fp64 for fp64 weights) `[T]`, or a pair of them.

    Raises:
        ValueError: shapes, dtypes, temperature, vocabulary size or targets do not fit; the message says what to give.

    A row whose incoming gradient is exactly 0 is left out of backward, NaN in its `hidden` or not.
    """
    options = HeadOptions(tp_group, vocab_size, temperature, chunk_tokens, sequence_parallel, reduce_hidden_gradient)
    check_grad_weight(grad_weight, weight)
    outputs = _LogProb.apply(hidden, weight, targets, mask, options, return_entropy, grad_weight, on_grad_weight)
    return outputs if return_entropy else outputs[0]


class _LogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, mask, options, return_entropy, grad_weight, on_grad_weight):
        with torch.autocast(hidden.device.type, enabled=False):
            head = make_head(hidden, weight, targets, mask, options)
            statistics, _ = logprob_pass(head, head.chunks(head.mask), entropy=return_entropy)
        ctx.save_for_backward(
            hidden,
            weight,
            targets,
            mask,
            statistics.shift,
            statistics.exp_sum,
            statistics.logprobs,
            statistics.entropies,
        )
        ctx.options = options
        ctx.set_materialize_grads(False)  # an entropy that nobody used costs no entropy gradient
        ctx.grad_weight, ctx.on_grad_weight = grad_weight, on_grad_weight
        return statistics.logprobs, statistics.entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropies):
        hidden, weight, targets, mask, shift, exp_sum, logprobs, entropies = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            head = lay_out(hidden, weight, targets, None, ctx.options)
            if grad_logprobs is None:
                grad_logprobs = torch.zeros_like(logprobs)
            if mask is not None:
                grad_logprobs = torch.where(mask, grad_logprobs, 0)
                grad_entropies = None if grad_entropies is None else torch.where(mask, grad_entropies, 0)
            sums = GradientSums(
                head,
                hidden=ctx.needs_input_grad[0],
                weight=ctx.needs_input_grad[1],
                num_rows=weight.shape[0],
                grad_weight=ctx.grad_weight if ctx.needs_input_grad[1] else None,
            )
            statistics = TokenStatistics(logprobs, shift, exp_sum, entropies)
            gradient_pass(head, statistics, grad_logprobs, grad_entropies, sums)
            grad_hidden, grad = sums.finish()
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        if ctx.grad_weight is not None and ctx.needs_input_grad[1]:
            grad = ctx.on_grad_weight() if ctx.on_grad_weight is not None else None
        elif grad is not None:
            grad = grad.to(weight.dtype)
        return grad_hidden, grad, None, None, None, None, None, None


def check_grad_weight(grad_weight: Tensor | None, weight: Tensor) -> None:
    """ValueError unless `grad_weight` can take the sum of gradients of `weight`."""
    if grad_weight is None:
        return
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    if grad_weight.shape != weight.shape or grad_weight.dtype != dtype:
        raise ValueError(
            f"grad_weight has shape {tuple(grad_weight.shape)} and dtype {grad_weight.dtype}: give {dtype} of the "
            f"weight's shape {tuple(weight.shape)}, or None to have the gradient returned"
        )
