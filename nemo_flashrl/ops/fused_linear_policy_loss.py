"""A per-token policy loss over an output layer in one pass: three matrix products, no logits kept.

Where the coefficient of a token follows from its own log-prob (REINFORCE with token ratios, PPO and GRPO clip against
stored log-probs, k1/k2/k3 KL to stored reference log-probs, an entropy bonus), the gradients of hidden and weight are
formed chunk by chunk right after the chunk's logits; backward only multiplies them by the incoming gradient.

Legend: T = tokens, H = hidden size, V = vocabulary rows over all ranks, TP = tensor-parallel size.

    def loss(logprobs, tokens):                     # REINFORCE with token ratios
        coefficient = -weights[tokens] * torch.exp(logprobs - behavior_logprobs[tokens])
        keep = mask[tokens]
        return torch.where(keep, coefficient * logprobs, 0), torch.where(keep, coefficient, 0)

    total, logprobs = fused_linear_policy_loss(hidden, weight, targets, loss)
    total.backward()
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .chunks import Chunk
from .fused_linear_logprob import check_grad_weight
from .head import Head, HeadOptions, make_head
from .passes import GradientSums, walk

# A trainer multiplies the loss by the number of microbatches and divides by it again: in fp32, (1 / 41) * 41 is not 1.
SCALE_TOLERANCE = 1e-6

# (logprobs [n], their place in the flat batch) -> (value [n], d value / d logprob [n])
TokenLoss = Callable[[Tensor, slice], tuple[Tensor, Tensor]]


def fused_linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    loss: TokenLoss,
    *,
    tp_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    temperature: float | Tensor = 1.0,
    chunk_tokens: int | None = None,
    entropy_weight: Tensor | None = None,
    return_entropy: bool = False,
    mask: Tensor | None = None,
    sequence_parallel: bool = False,
    reduce_hidden_gradient: bool = True,
    loss_scale: float = 1.0,
    grad_weight: Tensor | None = None,
    on_grad_weight: Callable[[], Tensor | None] | None = None,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """The sum of `loss` over all tokens and the log-probs, in one pass.

    Args as in `fused_linear_logprob`, and:
        loss: `loss(logprobs, tokens) -> (value, d value / d logprob)`, each `[n]`, for the n tokens of the slice
            `tokens` of the flat batch; called under no_grad, in fp32 (fp64). A token with derivative 0 reaches neither
            gradient, though an accelerator spends its two products on it. Where a chunk's tokens do not lie side by
            side, the slice is the whole batch: the log-probs of other tokens read 0, and what is returned for them is
            dropped.
        entropy_weight: fp32 `[T]`, dL/dentropy of each token: `sum(entropy_weight * entropy)` is added to the loss.
        return_entropy: also return the entropies.
        loss_scale: what backward will be given; gradients are formed at this scale, which fp16 and `grad_weight` need.
        grad_weight: fp32 (fp64) `[V / TP, H]`, for instance Megatron's `main_grad`: the gradient of `weight`, times
            `loss_scale`, is added there **during this call**. Backward then has to run with a gradient of `loss_scale`
            (to 1e-6), and hands autograd what `on_grad_weight()` returns, None by default. Without it the sum is staged
            in fp32 and returned in the weight's dtype.

    Returns:
        (loss, a scalar of fp32 (fp64), differentiable once; logprobs `[T]`, detached; entropies `[T]` if asked for)

    Raises:
        ValueError: as `fused_linear_logprob`; RuntimeError on a second backward.
    """
    options = HeadOptions(tp_group, vocab_size, temperature, chunk_tokens, sequence_parallel, reduce_hidden_gradient)
    check_grad_weight(grad_weight, weight)
    with_gradient = torch.is_grad_enabled()
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        head = make_head(hidden, weight, targets, mask, options)
        sums = gradient_sums(head, hidden, weight, grad_weight) if with_gradient else None
        total, logprobs, entropies = policy_pass(
            head, loss, head.mask, sums, loss_scale, entropy_weight=entropy_weight, entropy=return_entropy
        )
    total = attach_gradients(total, hidden, weight, sums, loss_scale, grad_weight is not None, on_grad_weight)
    return (total, logprobs, entropies) if return_entropy else (total, logprobs)


def policy_pass(
    head: Head,
    loss: TokenLoss,
    mask: Tensor | None,
    sums: GradientSums | None,
    loss_scale: float,
    *,
    entropy_weight: Tensor | None,
    entropy: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(loss, logprobs, entropies), with the gradients of `loss_scale * loss` added to `sums`; `mask` on the host.

    A chunk's exchange of 12 bytes a token is waited for: overlapping it with the next chunk's product would cost a
    second buffer of logits. The sum of the hidden gradients, 4 H bytes a token, does run under the next chunk's
    product.
    """
    entropy = entropy or entropy_weight is not None
    logprobs, total = head.per_token(), head.per_token()[:1].new_zeros(())
    entropies = head.per_token() if entropy else None
    chunks = head.chunks(mask)
    keep_logits = entropy_weight is not None and sums is not None
    for item in walk(head, chunks, entropy=entropy, keep_logits=keep_logits):
        chunk, statistics = item.chunk, item.exchange.result()
        chunk.put(logprobs, statistics.logprobs)
        value, derivative = apply_loss(loss, chunk, statistics.logprobs, head.targets.numel())
        total += value
        slope = None
        if entropy:
            chunk.put(entropies, statistics.entropies)
        if entropy_weight is not None:
            slope = chunk.take(entropy_weight).to(logprobs.dtype)
            total += torch.where(slope != 0, slope * statistics.entropies, 0).sum()
        if sums is not None:
            slope = None if slope is None else slope * loss_scale
            sums.add(chunk, item.rows, item.matrix, item.targets, statistics, derivative * loss_scale, slope)
    return total, logprobs, entropies


def apply_loss(loss: TokenLoss, chunk: Chunk, logprobs: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """(sum of values, derivatives `[C]`) of the chunk's tokens; rows that hold no token count 0."""
    if chunk.tokens is None and chunk.num_shards == 1:
        value, derivative = loss(logprobs, slice(chunk.start, chunk.stop))
        return value.sum(), derivative.to(logprobs.dtype)
    spread = logprobs.new_zeros(num_tokens)
    chunk.put(spread, logprobs)
    value, derivative = loss(spread, slice(0, num_tokens))
    return chunk.take(value).sum(), chunk.take(derivative).to(logprobs.dtype)


def gradient_sums(head: Head, hidden: Tensor, weight: Tensor, grad_weight: Tensor | None) -> GradientSums | None:
    """What collects the gradients that are asked for; None where none is."""
    if not (hidden.requires_grad or weight.requires_grad):
        return None
    return GradientSums(
        head,
        hidden=hidden.requires_grad,
        weight=weight.requires_grad,
        num_rows=weight.shape[0],
        grad_weight=grad_weight if weight.requires_grad else None,
    )


def attach_gradients(
    total: Tensor,
    hidden: Tensor,
    weight: Tensor,
    sums: GradientSums | None,
    loss_scale: float,
    weight_is_direct: bool,
    on_grad_weight: Callable[[], Tensor | None] | None,
) -> Tensor:
    """`total` as a function of `hidden` and `weight` whose gradients, times `loss_scale`, are already in `sums`."""
    if sums is None:
        return total
    return _FormedGradients.apply(hidden, weight, total, sums.finish(), loss_scale, weight_is_direct, on_grad_weight)


class _FormedGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, total, formed, loss_scale, weight_is_direct, on_grad_weight):
        ctx.formed = formed
        ctx.dtypes = (hidden.dtype, weight.dtype)
        ctx.settings = (loss_scale, weight_is_direct, on_grad_weight)
        return total.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        if ctx.formed is None:
            raise RuntimeError("backward ran twice: the gradients of a one-pass policy loss are handed over once")
        (grad_hidden, grad_weight), ctx.formed = ctx.formed, None
        loss_scale, weight_is_direct, on_grad_weight = ctx.settings
        factor = float(grad_output) / loss_scale
        if abs(factor - 1) <= SCALE_TOLERANCE:
            factor = 1.0
        if weight_is_direct:
            if factor != 1 and grad_weight is not None:
                raise RuntimeError(
                    f"backward got a gradient of {float(grad_output)}, but grad_weight was summed at "
                    f"loss_scale={loss_scale}: give that scale, or leave grad_weight out"
                )
            grad_weight = on_grad_weight() if on_grad_weight is not None and grad_weight is not None else None
        else:
            grad_weight = _scaled(grad_weight, factor, ctx.dtypes[1])
        return _scaled(grad_hidden, factor, ctx.dtypes[0]), grad_weight, None, None, None, None, None


def _scaled(gradient: Tensor | None, factor: float, dtype: torch.dtype) -> Tensor | None:
    """`factor * gradient` in place, without a pass over memory where the factor is 1."""
    if gradient is None:
        return None
    return (gradient if factor == 1 else gradient.mul_(factor)).to(dtype)
