"""Which tokens one chunk holds, and where they lie.

Legend: T = tokens of the flat batch, R = shards the hidden states are cut into (the tensor-parallel size under sequence
parallelism, else 1), c = rows a chunk takes of each shard, C = R * c = rows of a chunk.

Sequence parallelism cuts dim 0 of `[S, B, H]`, so rank r holds the flat tokens `[r * T / R, (r + 1) * T / R)`. A chunk
is the same columns of the `[R, T / R]` table on every rank: what is gathered for it is c rows a rank, never the whole.

    T = 12, R = 2, c = 2      rank 0: | 0 1 | 2 3 | 4 5 |     chunk 0 holds tokens 0 1 6 7, chunk 1 holds 2 3 8 9, ...
                              rank 1: | 6 7 | 8 9 | 10 11 |

Where tokens are selected, a shard with fewer of them than another is filled up with tokens that are not: their rows are
zeros, what comes of them is dropped, and no size depends on what only the device knows. All tables are made on the host
from the mask and copied once.

    selected: 0 3 4 5 | 7 10      chunk 0: 0 3 7 10      chunk 1: 4 5 (6) (8)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def to_host(values: Tensor) -> Tensor:
    """The one way by which numbers come to the host, which waits here for all that the device has yet to do."""
    return values.cpu()


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

    @property
    def own_real(self) -> Tensor | None:
        """bool [c, 1]: `real` of this rank's rows."""
        return None if self.real is None else self.real.view(self.num_shards, -1)[self.shard, :, None]

    def take(self, values: Tensor, fill: float = 0) -> Tensor:
        """The chunk's part, `[C]`, of per-token `values` `[T]`; `fill` on rows that hold no selected token."""
        if self.tokens is None:
            return values.reshape(self.num_shards, -1)[:, self.start : self.stop].reshape(-1)
        taken = values[self.tokens]
        return taken if self.real is None else torch.where(self.real, taken, fill)

    def put(self, values: Tensor, part: Tensor) -> None:
        """Write the chunk's part `[C]` back into per-token `values` `[T]`."""
        if self.tokens is None:
            values.view(self.num_shards, -1)[:, self.start : self.stop] = part.view(self.num_shards, -1)
        else:
            values[self.tokens] = part if self.real is None else torch.where(self.real, part, values[self.tokens])

    def take_rows(self, hidden: Tensor) -> Tensor:
        """This rank's `[c, H]` of its `hidden`: a view where it can be. Filled-up rows are zeros, whatever lies
        there."""
        if self.local is None:
            return hidden[self.start : self.stop]
        rows = hidden[self.local]
        return rows if self.real is None else rows.masked_fill_(~self.own_real, 0)

    def put_rows(self, grad_hidden: Tensor, rows: Tensor) -> None:
        """Write `[c, H]` into this rank's rows; filled-up rows are dropped."""
        if self.local is None:
            grad_hidden[self.start : self.stop] = rows
        elif self.real is None:
            grad_hidden[self.local] = rows.to(grad_hidden.dtype)
        else:  # each row is written once, and was 0; of a filled-up row another chunk may have written the token
            grad_hidden.index_add_(0, self.local, rows.masked_fill(~self.own_real, 0).to(grad_hidden.dtype))


def plan_chunks(
    num_tokens: int,
    chunk_tokens: int,
    selected: Tensor | None,
    num_shards: int = 1,
    shard: int = 0,
    device: torch.device | str = "cpu",
) -> list[Chunk]:
    """Cut T tokens, or the `selected` ones (bool `[T]`, on the host), into chunks of at most `chunk_tokens` rows (at
    least one a shard), whose tables lie on `device`.

    Every rank must pass the same `selected`, so that all walk the same chunks. Shards with fewer selected rows are
    filled up to the longest.
    """
    width = max(1, chunk_tokens // num_shards)
    shard_tokens = num_tokens // num_shards
    if selected is None or bool(selected.all()):
        starts = range(0, shard_tokens, width)
        return [Chunk(start, min(start + width, shard_tokens), num_shards, shard) for start in starts]

    parts = selected.view(num_shards, shard_tokens)
    counts = parts.sum(1)
    shortest = int(counts.min())
    longest = int(counts.max())
    order = (~parts).byte().argsort(stable=True, dim=1)[:, :longest]  # selected tokens first, all in their order
    order += torch.arange(num_shards)[:, None] * shard_tokens
    coded = torch.where(torch.arange(longest) < counts[:, None], order, ~order)  # a filled-up row is below 0
    columns = coded.split(width, 1) if longest else ()
    table = _to_device(torch.cat([part.reshape(-1) for part in columns] or [coded.reshape(-1)]), device)
    real = table >= 0
    tokens = torch.where(real, table, ~table)
    local = tokens - shard * shard_tokens

    chunks, start, first = [], 0, 0
    for part in columns:
        stop, last = start + part.shape[1], first + part.numel()
        own = slice(first + shard * part.shape[1], first + (shard + 1) * part.shape[1])
        some_real = real[first:last] if stop > shortest else None
        chunks.append(Chunk(start, stop, num_shards, shard, tokens[first:last], some_real, local[own]))
        start, first = stop, last
    return chunks


def _to_device(table: Tensor, device: torch.device | str) -> Tensor:
    """A copy that the host does not wait for, which takes pinned memory."""
    device = torch.device(device)
    if device.type == "cpu":
        return table
    pinned = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
    return pinned.copy_(table).to(device, non_blocking=True)
