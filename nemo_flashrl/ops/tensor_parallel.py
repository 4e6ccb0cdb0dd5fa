"""What ranks of a tensor-parallel group exchange for a chunk: statistics, hidden states, gradients of hidden states.

Legend: C = rows of a chunk, c = C / ranks (sequence parallelism), H = hidden size.

| when | what | bytes a token and rank |
| --- | --- | --- |
| forward | packed statistics, all-gathered | 12, with entropy 16 |
| forward and backward, sequence parallel | hidden states of the chunk, all-gathered one chunk ahead | H * element |
| gradient | gradient of the chunk's hidden states, reduced in fp32 while the next chunk's logits are formed | 4 H |

Without a group nothing is exchanged and the same code runs. Ranks must agree on which rows are live; they do, since the
per-token derivatives are functions of statistics that are equal on all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from .chunks import Chunk
from .softmax import ChunkStatistics, combine

# torch 2.13 renamed the flat collectives; containers of 2025 know only the former names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class StatisticsExchange:
    """One chunk's packed statistics on their way; other work may run before `result`."""

    def __init__(self, packed: Tensor, group: dist.ProcessGroup | None):
        self._packed = packed  # kept alive until the exchange is over
        self._work = None
        self._gathered = packed[None]
        if group is not None:
            self._gathered = packed.new_empty(dist.get_world_size(group), *packed.shape)
            self._work = _all_gather(self._gathered, packed[None], group=group, async_op=True)

    def result(self) -> ChunkStatistics:
        if self._work is not None:
            self._work.wait()
        logprobs, shift, exp_sum, entropies = combine(self._gathered)
        return ChunkStatistics(logprobs, shift, exp_sum, self._packed[0], entropies)


def gathered_rows(
    hidden: Tensor, chunks: list[Chunk], group: dist.ProcessGroup | None, sequence_parallel: bool
) -> Iterator[tuple[Chunk, Tensor]]:
    """Each chunk with its hidden states `[C, H]`; under sequence parallelism the next chunk's are fetched meanwhile."""
    if not sequence_parallel:
        for chunk in chunks:
            yield chunk, chunk.take_rows(hidden)
        return

    def fetch(chunk: Chunk):
        mine = chunk.take_rows(hidden)
        rows = mine.new_empty(chunk.num_rows, mine.shape[1])
        return rows, mine, _all_gather(rows, mine, group=group, async_op=True)

    ahead = fetch(chunks[0]) if chunks else None
    for index, chunk in enumerate(chunks):
        rows, _, work = ahead
        work.wait()
        ahead = fetch(chunks[index + 1]) if index + 1 < len(chunks) else None
        yield chunk, rows


@dataclass(slots=True)
class HiddenGradient:
    """The gradient of a rank's hidden states, filled a chunk at a time and summed over the group as asked."""

    values: Tensor  # [T, H], or this rank's shard; zeros at first
    group: dist.ProcessGroup | None
    sequence_parallel: bool
    reduce: bool  # False leaves each rank its own part of the sum
    _pending: tuple | None = field(default=None)

    def put(self, chunk: Chunk, live: Tensor | None, part: Tensor) -> None:
        """Take over `part` `[n, H]`, of the chunk's rows `live` (int64 `[n]`, None = all).

        The sum over ranks runs on while the caller goes to the next chunk; `settle` before `part` is written again.
        """
        if self.sequence_parallel:
            if live is not None:
                part = part.new_zeros(chunk.num_rows, part.shape[1]).index_copy_(0, live, part)
            mine = part.new_empty(part.shape[0] // chunk.num_shards, part.shape[1])
            work = _reduce_scatter(mine, part, group=self.group, async_op=True)
            self._pending = (work, chunk, None, mine, part)
        elif self.group is not None and self.reduce:
            work = dist.all_reduce(part, group=self.group, async_op=True)
            self._pending = (work, chunk, live, part, part)
        else:
            self._store(chunk, live, part)

    def settle(self) -> None:
        """Wait for the sum in flight, if any, and store it."""
        if self._pending is not None:
            work, chunk, live, mine, _ = self._pending
            self._pending = None
            work.wait()
            self._store(chunk, live, mine)

    def _store(self, chunk: Chunk, live: Tensor | None, rows: Tensor) -> None:
        if live is None:
            chunk.put_rows(self.values, rows)
        elif chunk.local is None:
            self.values[chunk.start + live] = rows.to(self.values.dtype)
        else:
            self.values[chunk.local[live]] = rows.to(self.values.dtype)


def shard_of(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """(rank, size) within the group; (0, 1) without one."""
    if group is None or dist.get_world_size(group) == 1:
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)
