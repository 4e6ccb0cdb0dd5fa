"""A policy loss behind a gate that sees every log-prob first, such as a bound on a trajectory's mean divergence.

No token's coefficient is known before all log-probs are, and by then most logits are gone. A live share f of the tokens
(masked, rejected, clipped and zero-advantage tokens are not live) costs

| when | matrix products |
| --- | --- |
| log-probs at the current weights are given | 3f: only live rows are ever computed |
| a chunk's exponentials are still there: the last chunk always, more within `logits_budget_bytes` | 1 + 2f |
| else | 1 + 3f: the logits of live rows are formed again |

with the same numbers. Gradients are formed in forward, as in the one-pass loss.

Legend: T = tokens, H = hidden size, V = vocabulary rows over all ranks, TP = tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .chunks import Chunk, to_host
from .fused_linear_logprob import check_grad_weight
from .fused_linear_policy_loss import attach_gradients, gradient_sums, policy_pass
from .head import Head, HeadOptions, make_head
from .passes import ChunkLogits, GradientSums, gradient_pass, logprob_pass
from .tensor_parallel import gathered_rows

DEFAULT_LOGITS_BUDGET = 2**28

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
    temperature: float | Tensor = 1.0,
    chunk_tokens: int | None = None,
    logprobs: Tensor | None = None,
    entropies: Tensor | None = None,
    logits_budget_bytes: int = DEFAULT_LOGITS_BUDGET,
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
        logits_budget_bytes: how much logits may take on this rank, `4 T V / TP` (fp64: 8) being the whole; one chunk's
            worth is taken in any case. What fits is not computed twice.
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

    with_gradient = torch.is_grad_enabled()
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        head = make_head(hidden, weight, targets, mask, options)
        sums = gradient_sums(head, hidden, weight, grad_weight) if with_gradient else None
        if logprobs is not None:
            total = _given(head, rule, logprobs, entropies, sums, loss_scale)
        else:
            # Reckoned with the padded shard, so that all ranks hold the same chunks.
            held_rows = logits_budget_bytes // (weight.shape[0] * head.products.dtype.itemsize)
            total, logprobs, entropies = _two_walks(head, rule, sums, loss_scale, entropy, held_rows)
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

        policy_pass(head, known, to_host(live), sums, loss_scale, entropy_weight=slope, entropy=False)
    return total


def _two_walks(
    head: Head,
    rule: _Rule,
    sums: GradientSums | None,
    loss_scale: float,
    entropy: bool,
    held_rows: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(loss, log-probs, entropies): a walk for the log-probs, then one over the live rows, chunks still held first."""
    chunks, num_held = head.chunks(head.mask), 0
    if sums is not None and chunks:
        num_held = min(len(chunks), max(1, held_rows // chunks[0].num_rows))
    statistics, held = logprob_pass(
        head, chunks, entropy=entropy, keep_logits=rule.entropy_weight is not None, num_held=num_held
    )
    total, derivative, slope = rule.decide(statistics.logprobs, statistics.entropies)
    if sums is None:
        return total, statistics.logprobs, statistics.entropies
    derivative = derivative * loss_scale
    slope = None if slope is None else slope * loss_scale

    _add_held(head, chunks[len(chunks) - num_held :], held, derivative, slope, sums)
    gradient_pass(head, statistics, derivative, slope, sums)
    return total, statistics.logprobs, statistics.entropies


def _add_held(
    head: Head,
    chunks: list[Chunk],
    held: list[ChunkLogits],
    derivative: Tensor,
    slope: Tensor | None,
    sums: GradientSums,
) -> None:
    """The gradients of chunks whose logits are there; their derivatives `[T]` are 0 afterwards."""
    for chunk, rows in gathered_rows(head.hidden, chunks, head.group, head.sequence_parallel):
        item = held.pop(0)  # its storage goes as soon as it is used up
        part = None if slope is None else chunk.take(slope)
        sums.add(chunk, rows, item.matrix, item.targets, item.statistics, chunk.take(derivative), part)
        del item
        for done in (derivative,) if slope is None else (derivative, slope):
            chunk.put(done, done.new_zeros(chunk.num_rows))
