"""The walks over the output layer that the public functions are made of.

Legend: T = tokens, C = rows of a chunk, n = live rows of a chunk, H = hidden size, V = this rank's vocabulary rows,
y = the target.

With c = dL/dlogp and w = dL/dentropy of one token, e_v = exp(z_v - shift) and S their sum over the whole vocabulary,

    dL/dz_v = c (1[v = y] - p_v) - w p_v (log p_v + entropy),        p_v = e_v / S

The target's entry is taken out of e and added as a term of its own, c (1 - p_y) = -c expm1(log p_y) in fp32: where p_y
is near 1, as most sampled tokens are, half-precision products would lose the difference. No further `[C, V]` pass:

    dhidden = a * (e @ W) + t * W[y]         dW += e^T @ (a * hidden)        dW[y] += t * hidden
    a = -c / (S temperature)                 t = -c expm1(log p_y) / temperature

and with an entropy term e_v is weighted by c + w (log p_v + entropy) in the same pass that forms it.

So on a CPU, where the host may look at a number at any time: it leaves out rows without a derivative, and the shift of
exponentials that need none. On an accelerator a look would wait for all that is queued, and every pass over `[C, V]`
counts beside products that are fast. There logits stay until the derivatives are known, and one kernel makes dL/dz of
them in the weights' dtype, the target's entry included, rows without a derivative as zeros:

    dhidden = dL/dz @ W        dW += dL/dz^T @ hidden
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .chunks import Chunk, to_host
from .head import Head
from .kernels import logit_gradient_, row_statistics
from .softmax import (
    ChunkStatistics,
    compact_,
    exponentials_,
    local_statistics,
    unshifted_statistics,
    weighted_exponentials_,
)
from .tensor_parallel import HiddenGradient, StatisticsExchange, gathered_rows


@dataclass(frozen=True, slots=True)
class TokenStatistics:
    """What the log-prob pass leaves for the gradient pass, each fp32 (fp64) `[T]`; outside the mask, the fill."""

    logprobs: Tensor  # fill 0
    shift: Tensor  # fill 0
    exp_sum: Tensor  # fill 1
    entropies: Tensor | None  # fill 0

    def of(self, chunk: Chunk) -> ChunkStatistics:
        shift = chunk.take(self.shift)
        entropies = None if self.entropies is None else chunk.take(self.entropies)
        return ChunkStatistics(chunk.take(self.logprobs), shift, chunk.take(self.exp_sum, 1), shift, entropies)


@dataclass(slots=True)
class ChunkLogits:
    """A chunk between its logits and its gradient."""

    chunk: Chunk
    rows: Tensor | None  # hidden states [C, H]
    matrix: Tensor  # [C, V] logits, or exp(logits - local shift); on an accelerator unscaled logits
    targets: Tensor  # int64 [C]
    exchange: StatisticsExchange
    statistics: ChunkStatistics | None = None  # once the exchange is over


def walk(
    head: Head, chunks: list[Chunk], *, entropy: bool, keep_logits: bool = False, num_held: int = 0
) -> Iterator[ChunkLogits]:
    """Each chunk with its logits' statistics under way; one buffer `[rows of the largest chunk, V]` serves them all.

    The last `num_held` chunks may be kept: each of them has storage of its own, the first of them the buffer.
    """
    buffer = chunk_buffer(head, chunks)
    num_shared = len(chunks) - max(0, num_held - 1)
    # Until the first chunk that shows otherwise. An entropy is a difference, and wants the maximum as its shift.
    may_be_unshifted = not (entropy or keep_logits or head.num_columns == 0 or head.hidden.dtype == torch.float16)
    rows_of = gathered_rows(head.hidden, chunks, head.group, head.sequence_parallel)
    for index, (chunk, rows) in enumerate(rows_of):
        matrix = buffer[: chunk.num_rows] if index < num_shared else head.empty_logits(chunk.num_rows)
        targets = chunk.take(head.targets)
        if not head.may_look:
            head.products.logits(rows, 1.0, matrix)
            packed = row_statistics(matrix, targets, head.first_row, head.scale(chunk), entropy=entropy)
            yield ChunkLogits(chunk, rows, matrix, targets, StatisticsExchange(packed, head.group))
            continue
        head.products.logits(rows, head.scale(chunk), matrix)
        columns, owned = head.columns(targets)
        packed = None
        if may_be_unshifted:
            packed = unshifted_statistics(matrix, columns, owned)
            may_be_unshifted = packed is not None
            if packed is None:
                head.products.logits(rows, head.scale(chunk), matrix)
        if packed is None:
            packed = local_statistics(matrix, columns, owned, entropy=entropy, keep_logits=keep_logits)
        yield ChunkLogits(chunk, rows, matrix, targets, StatisticsExchange(packed, head.group))


def chunk_buffer(head: Head, chunks: list[Chunk]) -> Tensor:
    return head.empty_logits(max((chunk.num_rows for chunk in chunks), default=0))


def logprob_pass(
    head: Head, chunks: list[Chunk], *, entropy: bool, keep_logits: bool = False, num_held: int = 0
) -> tuple[TokenStatistics, list[ChunkLogits]]:
    """One product: all statistics, and the last `num_held` chunks with their logits or exponentials.

    A chunk's exchange runs while the next chunk's logits are formed, in the same buffer: nothing else is needed of it.
    """
    statistics = TokenStatistics(
        head.per_token(), head.per_token(), head.per_token(1), head.per_token() if entropy else None
    )

    def settle(item: ChunkLogits) -> None:
        chunk, item.statistics = item.chunk, item.exchange.result()
        chunk.put(statistics.logprobs, item.statistics.logprobs)
        chunk.put(statistics.shift, item.statistics.shift)
        chunk.put(statistics.exp_sum, item.statistics.exp_sum)
        if entropy:
            chunk.put(statistics.entropies, item.statistics.entropies)

    held, before = [], None
    walked = walk(head, chunks, entropy=entropy, keep_logits=keep_logits, num_held=num_held)
    for index, item in enumerate(walked):
        item.rows = None  # to be gathered again: those of held chunks together could be the whole of hidden
        if before is not None:
            settle(before)
        if index >= len(chunks) - num_held:
            held.append(item)
        before = item
    if before is not None:
        settle(before)
    return statistics, held


def gradient_pass(
    head: Head, statistics: TokenStatistics, derivative: Tensor, entropy_derivative: Tensor | None, sums: GradientSums
) -> None:
    """Three products over the live rows only: those whose derivatives `[T]` are not both zero."""
    live = derivative != 0
    if entropy_derivative is not None:
        live |= entropy_derivative != 0
    chunks = head.chunks(to_host(live))
    buffer = chunk_buffer(head, chunks)
    for chunk, rows in gathered_rows(head.hidden, chunks, head.group, head.sequence_parallel):
        matrix = buffer[: chunk.num_rows]
        head.products.logits(rows, head.scale(chunk) if head.may_look else 1.0, matrix)
        chunk_statistics = statistics.of(chunk)
        slope = None if entropy_derivative is None else chunk.take(entropy_derivative)
        if slope is None and head.may_look:
            exponentials_(matrix, chunk_statistics.shift)
        sums.add(chunk, rows, matrix, chunk.take(head.targets), chunk_statistics, chunk.take(derivative), slope)


class GradientSums:
    """Gradients of hidden states and weight, summed over chunks. Rows with zero derivative never reach a product."""

    def __init__(self, head: Head, *, hidden: bool, weight: bool, num_rows: int, grad_weight: Tensor | None = None):
        """`num_rows` = rows of the weight shard, padding included; `grad_weight` fp32 `[num_rows, H]` is added to."""
        self.head = head
        shape, dtype = head.hidden.shape, head.hidden.dtype
        # fp16 stops at 6e-8; these values are yet to be multiplied by the loss scale.
        staged = head.products.dtype if dtype == torch.float16 else dtype
        self.hidden = None
        if hidden:
            values = torch.zeros(shape, dtype=staged, device=head.hidden.device)
            self.hidden = HiddenGradient(values, head.group, head.sequence_parallel, head.reduce_hidden_gradient)
        self.weight = grad_weight
        if weight and grad_weight is None:
            self.weight = torch.zeros(num_rows, shape[1], dtype=head.products.dtype, device=head.hidden.device)
        self._part = None

    def add(
        self,
        chunk: Chunk,
        rows: Tensor,
        matrix: Tensor,
        targets: Tensor,
        statistics: ChunkStatistics,
        derivative: Tensor,
        entropy_derivative: Tensor | None,
    ) -> None:
        """Add one chunk: `rows` `[C, H]`; `matrix` `[C, V]`, used up, as `walk` leaves it; the others `[C]`."""
        if not self.head.may_look:
            self._add_unseen(chunk, rows, matrix, targets, statistics, derivative, entropy_derivative)
            return
        live = derivative != 0 if entropy_derivative is None else (derivative != 0) | (entropy_derivative != 0)
        num_live = int(live.sum())
        if num_live == 0:
            return
        order = None if num_live == live.numel() else compact_(matrix, live, num_live)
        matrix = matrix[:num_live]

        def pick(values: Tensor) -> Tensor:
            return values if order is None else values[order]

        columns, owned = self.head.columns(pick(targets))
        logprobs, derivative = pick(statistics.logprobs), pick(derivative)
        local_shift = pick(statistics.local_shift)
        log_share = local_shift - pick(statistics.shift) - pick(statistics.exp_sum).log()
        share = log_share.exp()  # of one unit of the stored exponentials in the probability
        target_factor = -torch.expm1(logprobs) * derivative
        if entropy_derivative is None:
            row_factor = -derivative * share
        else:
            # Entries are kept near 1 whatever the derivatives are, so that half precision holds them.
            slope, entropies = pick(entropy_derivative), pick(statistics.entropies)
            size = torch.maximum(derivative.abs(), slope.abs())
            row_factor = -size * share
            target_factor = target_factor - slope * logprobs.exp() * (logprobs + entropies)
            constant = (derivative + slope * (log_share + entropies)) / size
            if self.head.num_columns:
                weighted_exponentials_(matrix, local_shift, constant, slope / size)
        scale = self.head.scale(chunk)
        scale = pick(scale) if isinstance(scale, Tensor) else scale
        target_factor = torch.where(owned, target_factor * scale, 0)
        self._add_products(chunk, order, pick(rows), matrix, columns, owned, row_factor * scale, target_factor)

    def _add_products(self, chunk, order, rows, matrix, columns, owned, row_factor, target_factor) -> None:
        products, num_columns = self.head.products, self.head.num_columns
        if num_columns:
            entries = matrix.gather(1, columns[:, None])
            matrix.scatter_(1, columns[:, None], entries.masked_fill_(owned[:, None], 0))
        if self.hidden is not None:
            part = self._settled_part(chunk)[: rows.shape[0]]
            if num_columns:
                products.hidden_gradient(matrix, part)
                part.mul_(row_factor[:, None])
                for some in target_blocks(rows.shape[0]):
                    part[some].addcmul_(products.weight[columns[some]], target_factor[some, None])
            else:
                part.zero_()
            self.hidden.put(chunk, order, part)
        if self.weight is not None and num_columns:
            own = self.weight[:num_columns]
            products.add_weight_gradient(matrix, rows * row_factor[:, None], own)
            for some in target_blocks(rows.shape[0]):
                own.index_add_(0, columns[some], rows[some] * target_factor[some, None])

    def _add_unseen(self, chunk, rows, logits, targets, statistics, derivative, slope) -> None:
        """As `add`, without a look at any number."""
        head, products, size = self.head, self.head.products, None
        live = derivative != 0 if slope is None else (derivative != 0) | (slope != 0)
        rows = torch.where(live[:, None], rows, 0)  # what lies on the others may be NaN
        if rows.dtype == torch.float16:  # reaches down to 6e-8: a mean over a million tokens would vanish
            sizes = derivative.abs() if slope is None else torch.maximum(derivative.abs(), slope.abs())
            size = sizes.amax().clamp(min=torch.finfo(sizes.dtype).tiny)
            derivative, slope = derivative / size, None if slope is None else slope / size
        if head.num_columns:
            dtype, scale = products.weight.dtype, head.scale(chunk)
            gradient = logit_gradient_(logits, dtype, targets, head.first_row, scale, statistics, derivative, slope)
        if self.hidden is not None:
            part = self._settled_part(chunk)
            if head.num_columns:
                products.hidden_gradient(gradient, part)
                if size is not None:
                    part.mul_(size)
            else:
                part.zero_()
            self.hidden.put(chunk, None, part)
        if self.weight is not None and head.num_columns:
            products.add_weight_gradient(gradient, rows, self.weight[: head.num_columns], size)

    def _settled_part(self, chunk: Chunk) -> Tensor:
        """`[C, H]` to write a part of the hidden gradient in, when the one before has left it."""
        self.hidden.settle()
        return self._part_buffer(chunk.num_rows)

    def _part_buffer(self, num_rows: int) -> Tensor:
        if self._part is None or self._part.shape[0] < num_rows:
            width = self.head.hidden.shape[1]
            self._part = torch.empty(num_rows, width, dtype=self.head.products.dtype, device=self.head.hidden.device)
        return self._part[:num_rows]

    def finish(self) -> tuple[Tensor | None, Tensor | None]:
        """(gradient of hidden, gradient of weight), in the dtypes they were summed in."""
        self._part = None
        if self.hidden is None:
            return None, self.weight
        self.hidden.settle()
        return self.hidden.values, self.weight


def target_blocks(num_rows: int) -> Iterator[slice]:
    """The targets' own terms a few at a time: those of a whole chunk would be one more `[C, H]` fp32 matrix."""
    return (slice(start, start + 256) for start in range(0, num_rows, 256))
