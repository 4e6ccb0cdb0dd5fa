"""Which tokens one chunk holds, and where they lie.

Legend: T = tokens of the flat batch, R = shards the hidden states are cut into (the tensor-parallel size under sequence
parallelism, else 1), c = rows a chunk takes of each shard, C = R * c = rows of a chunk.

Sequence parallelism cuts dim 0 of `[S, B, H]`, so rank r holds the flat tokens `[r * T / R, (r + 1) * T / R)`. A chunk
is the same columns of the `[R, T / R]` table on every rank: what is gathered for it is c rows a rank, never the whole.

    T = 12, R = 2, c = 2      rank 0: | 0 1 | 2 3 | 4 5 |     chunk 0 holds tokens 0 1 6 7, chunk 1 holds 2 3 8 9, ...
                              rank 1: | 6 7 | 8 9 | 10 11 |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk: columns `[start, stop)` of the token table, or of the table of selected rows."""

    start: int
    stop: int
    num_shards: int
    shard: int  # which shard this rank holds
    tokens: Tensor | None = None  # int64 [C], flat token of each row; None where the columns are tokens themselves
    real: Tensor | None = None  # bool [C], False on the rows that fill up a shard with fewer selected rows; None = all
    local: Tensor | None = None  # int64 [c], this rank's rows of its hidden states

    @property
    def num_rows(self) -> int:
        return self.num_shards * (self.stop - self.start)

    def take(self, values: Tensor, fill: float = 0) -> Tensor:
        """The chunk's part, `[C]`, of per-token `values` `[T]`; `fill` on rows that hold no token."""
        if self.tokens is None:
            return values.reshape(self.num_shards, -1)[:, self.start : self.stop].reshape(-1)
        taken = values[self.tokens]
        return taken if self.real is None else torch.where(self.real, taken, fill)

    def put(self, values: Tensor, part: Tensor) -> None:
        """Write the chunk's part `[C]` back into per-token `values` `[T]`."""
        if self.tokens is None:
            values.view(self.num_shards, -1)[:, self.start : self.stop] = part.view(self.num_shards, -1)
        elif self.real is None:
            values[self.tokens] = part
        else:
            values[self.tokens[self.real]] = part[self.real]

    def take_rows(self, hidden: Tensor) -> Tensor:
        """This rank's `[c, H]` of its `hidden`: a view where it can be. Filled-up rows are zeros, whatever lies
        there."""
        if self.local is None:
            return hidden[self.start : self.stop]
        rows = hidden[self.local]
        if self.real is None:
            return rows
        return rows.masked_fill_(~self.real.view(self.num_shards, -1)[self.shard, :, None], 0)

    def put_rows(self, grad_hidden: Tensor, rows: Tensor) -> None:
        """Write `[c, H]` into this rank's rows; filled-up rows are dropped."""
        if self.local is None:
            grad_hidden[self.start : self.stop] = rows
        elif self.real is None:
            grad_hidden[self.local] = rows.to(grad_hidden.dtype)
        else:
            mine = self.real.view(self.num_shards, -1)[self.shard]
            grad_hidden[self.local[mine]] = rows[mine].to(grad_hidden.dtype)

    def spans(self, num_tokens: int) -> list[tuple[slice, slice, Tensor | None]]:
        """What a per-token function sees of the chunk, a shard at a time: (tokens, rows of the chunk, places in the
        span).

        Tokens are always one contiguous slice of the flat batch. Where rows were selected, the slice runs from the
        first to the last of them and `places` says which of its tokens are meant.
        """
        width, shard_tokens = self.stop - self.start, num_tokens // self.num_shards
        spans = []
        for shard in range(self.num_shards):
            rows = slice(shard * width, (shard + 1) * width)
            if self.tokens is None:
                spans.append((slice(shard * shard_tokens + self.start, shard * shard_tokens + self.stop), rows, None))
                continue
            tokens = self.tokens[rows] if self.real is None else self.tokens[rows][self.real[rows]]
            if tokens.numel():
                first, last = int(tokens[0]), int(tokens[-1])
                spans.append((slice(first, last + 1), slice(rows.start, rows.start + tokens.numel()), tokens - first))
        return spans


def plan_chunks(
    num_tokens: int, chunk_tokens: int, selected: Tensor | None, num_shards: int = 1, shard: int = 0
) -> list[Chunk]:
    """Cut T tokens, or the `selected` ones (bool `[T]`), into chunks of at most `chunk_tokens` rows (at least one a
    shard).

    Every rank must pass the same `selected`, so that all walk the same chunks. Shards with fewer selected rows are
    filled up to the longest.
    """
    width = max(1, chunk_tokens // num_shards)
    shard_tokens = num_tokens // num_shards
    if selected is None or bool(selected.all()):
        starts = range(0, shard_tokens, width)
        return [Chunk(start, min(start + width, shard_tokens), num_shards, shard) for start in starts]

    rows = [part.nonzero().squeeze(1) for part in selected.view(num_shards, shard_tokens)]
    longest = max(part.numel() for part in rows)
    table = torch.full((num_shards, longest), -1, dtype=torch.int64, device=selected.device)
    for part, line in zip(rows, table, strict=True):
        line[: part.numel()] = part
    filled = any(part.numel() < longest for part in rows)
    offsets = torch.arange(num_shards, device=selected.device)[:, None] * shard_tokens

    chunks = []
    for start in range(0, longest, width):
        columns = table[:, start : start + width]
        tokens = (columns.clamp(min=0) + offsets).reshape(-1)
        real = (columns >= 0).reshape(-1) if filled else None
        stop = start + columns.shape[1]
        chunks.append(Chunk(start, stop, num_shards, shard, tokens, real, columns[shard].clamp(min=0)))
    return chunks
