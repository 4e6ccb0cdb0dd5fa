"""A policy loss behind a gate that sees every log-prob first, such as a sequence gate on a trajectory's mean
divergence.

No token's coefficient is known before all log-probs are. Three ways give the same numbers; the cheapest that the inputs
allow is taken, for a live share f of the tokens (masked, rejected, clipped and zero-advantage tokens are not live):

| when | matrix products |
| --- | --- |
| log-probs at the current weights are given | 3f: only live rows are ever computed |
| the logits of all tokens fit one chunk, or `logits_budget_bytes` | 1 + 2f, gradients formed in forward |
| else | 1 + 3f, live logits recomputed in backward |

Legend: T = tokens, H = hidden size, V = vocabulary rows over all ranks, TP = tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .fused_linear_logprob import check_grad_weight, fused_linear_logprob
from .fused_linear_policy_loss import attach_gradients, gradient_sums, policy_pass
from .head import DEFAULT_CHUNK_TOKENS, Head, HeadOptions, make_head
from .passes import ChunkLogits, GradientSums, walk
from .tensor_parallel import gathered_rows

# (all log-probs [T], all entropies [T] or None) -> which tokens enter the loss, bool [T]
GateRule = Callable[[Tensor, Tensor | None], Tensor]
# (log-probs [n], what the gate kept [T], their place in the flat batch) -> (value [n], d value / d logprob [n])
GatedTokenLoss = Callable[[Tensor, Tensor, slice], tuple[Tensor, Tensor]]


def fused_linear_gated_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    gate: GateRule,
    loss: GatedTokenLoss,
    *,
    tp_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    logprobs: Tensor | None = None,
    entropies: Tensor | None = None,
    logits_budget_bytes: int = 0,
    entropy_weight: Tensor | None = None,
    return_entropy: bool = False,
    mask: Tensor | None = None,
    sequence_parallel: bool = False,
    reduce_hidden_gradient: bool = True,
    loss_scale: float = 1.0,
    grad_weight: Tensor | None = None,
    on_grad_weight: Callable[[], Tensor | None] | None = None,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """The sum of `loss` over all tokens, after `gate` has seen all log-probs.

    Args as in `fused_linear_policy_loss`, and:
        gate: `gate(logprobs, entropies) -> keep`, fp32 (fp64) `[T]` and the same or None -> bool `[T]`; called once,
            under no_grad. Entropies are computed for it where `return_entropy` or `entropy_weight` asks for them.
        loss: `loss(logprobs, keep, tokens) -> (value, d value / d logprob)`, 0 where not `keep`.
        logprobs, entropies: fp32 (fp64) `[T]` at the current weights and temperature, where a former pass has left
            them.
        logits_budget_bytes: how much logits may take on this rank, `4 T V / TP` (8 for fp64) being the whole; what fits
            one chunk always may.
        entropy_weight: as in `fused_linear_policy_loss`; counts where the gate keeps a token.

    Returns:
        (loss, a scalar; logprobs `[T]`, detached; entropies `[T]` if asked for)

    Raises:
        ValueError: as `fused_linear_logprob`, or log-probs given where entropies are needed but not given.
    """
    options = HeadOptions(tp_group, vocab_size, temperature, chunk_tokens, sequence_parallel, reduce_hidden_gradient)
    rule = _Rule(gate, loss, mask, entropy_weight)
    entropy = return_entropy or entropy_weight is not None
    check_grad_weight(grad_weight, weight)
    if logprobs is not None and entropy and entropies is None:
        raise ValueError("logprobs are given and entropies are needed, but entropies=None: give both, or neither")

    # The sizes below are equal on all ranks, so that all ranks take the same way.
    num_rows = targets.numel() if mask is None else int(mask.sum())
    num_bytes = num_rows * weight.shape[0] * (8 if weight.dtype == torch.float64 else 4)
    if logprobs is None and num_rows > chunk_tokens and num_bytes > logits_budget_bytes:
        total, logprobs, entropies = _recomputed(
            hidden, weight, targets, mask, rule, options, entropy, grad_weight, on_grad_weight
        )
    else:
        with_gradient = torch.is_grad_enabled()
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            head = make_head(hidden, weight, targets, mask, options)
            sums = gradient_sums(head, hidden, weight, grad_weight) if with_gradient else None
            if logprobs is None:
                total, logprobs, entropies = _held(head, mask, rule, sums, loss_scale, entropy)
            else:
                total = _given(head, rule, logprobs, entropies, sums, loss_scale)
        total = attach_gradients(total, hidden, weight, sums, loss_scale, grad_weight is not None, on_grad_weight)
    return (total, logprobs, entropies) if return_entropy else (total, logprobs)


@dataclass(frozen=True, slots=True)
class _Rule:
    gate: GateRule
    loss: GatedTokenLoss
    mask: Tensor | None
    entropy_weight: Tensor | None

    def decide(self, logprobs: Tensor, entropies: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """(loss, d loss / d logprob [T], d loss / d entropy [T] or None) from all log-probs."""
        keep = self.gate(logprobs, entropies)
        value, derivative = self.loss(logprobs, keep, slice(0, logprobs.numel()))
        derivative = derivative.to(logprobs.dtype)
        if self.mask is not None:
            keep = keep & self.mask
            value, derivative = torch.where(self.mask, value, 0), torch.where(self.mask, derivative, 0)
        total = value.sum()
        if self.entropy_weight is None:
            return total, derivative, None
        slope = torch.where(keep, self.entropy_weight.to(logprobs.dtype), 0)
        return total + torch.where(keep, slope * entropies, 0).sum(), derivative, slope


def _given(
    head: Head, rule: _Rule, logprobs: Tensor, entropies: Tensor | None, sums: GradientSums | None, loss_scale: float
) -> Tensor:
    """3f products: the coefficients are known, and the one-pass walk visits live rows alone."""
    total, derivative, slope = rule.decide(logprobs, entropies)
    if sums is not None:
        live = derivative != 0 if slope is None else (derivative != 0) | (slope != 0)

        def known(_: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
            return derivative[tokens], derivative[tokens]

        policy_pass(head, known, live, sums, loss_scale, entropy_weight=slope, entropy=False)
    return total


def _held(
    head: Head, mask: Tensor | None, rule: _Rule, sums: GradientSums | None, loss_scale: float, entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """1 + 2f products: exponentials (logits, where an entropy term needs them) of all chunks wait for the gate."""
    logprobs, entropies = head.per_token(), head.per_token() if entropy else None
    chunks = head.chunks(mask)
    waiting: list[ChunkLogits | None] = []
    for item in walk(head, chunks, None, entropy=entropy, keep_logits=rule.entropy_weight is not None):
        item.statistics = item.exchange.result()
        item.chunk.put(logprobs, item.statistics.logprobs)
        if entropy:
            item.chunk.put(entropies, item.statistics.entropies)
        item.rows = None  # gathered again: together they would be the whole of hidden
        waiting.append(item)
    total, derivative, slope = rule.decide(logprobs, entropies)
    if sums is not None:
        for index, (chunk, rows) in enumerate(gathered_rows(head.hidden, chunks, head.group, head.sequence_parallel)):
            item, waiting[index] = waiting[index], None
            part = None if slope is None else chunk.take(slope) * loss_scale
            sums.add(chunk, rows, item.matrix, item.targets, item.statistics, chunk.take(derivative) * loss_scale, part)
    return total, logprobs, entropies


def _recomputed(
    hidden, weight, targets, mask, rule, options, entropy, grad_weight, on_grad_weight
) -> tuple[Tensor, Tensor, Tensor | None]:
    """1 + 3f products: a differentiable log-prob pass, whose backward recomputes live rows, with the rule on top."""
    result = fused_linear_logprob(
        hidden,
        weight,
        targets,
        tp_group=options.tp_group,
        vocab_size=options.vocab_size,
        temperature=options.temperature,
        chunk_tokens=options.chunk_tokens,
        return_entropy=entropy,
        mask=mask,
        sequence_parallel=options.sequence_parallel,
        reduce_hidden_gradient=options.reduce_hidden_gradient,
        grad_weight=grad_weight,
        on_grad_weight=on_grad_weight,
    )
    logprobs, entropies = result if entropy else (result, None)
    total = _Decided.apply(logprobs, entropies, rule)
    return total, logprobs.detach(), None if entropies is None else entropies.detach()


class _Decided(torch.autograd.Function):
    """The rule's loss as a function of log-probs and entropies, with the derivatives the rule itself gives."""

    @staticmethod
    def forward(ctx, logprobs, entropies, rule):
        total, derivative, slope = rule.decide(logprobs.detach(), None if entropies is None else entropies.detach())
        ctx.save_for_backward(derivative, slope)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        derivative, slope = ctx.saved_tensors
        return grad_output * derivative, None if slope is None else grad_output * slope, None
