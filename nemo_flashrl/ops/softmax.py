"""Softmax statistics of a chunk of logits, computed where the logits lie.

Legend: C = rows of a chunk, V = this rank's rows of the true vocabulary (0 on a rank that owns only padding).

With z the logits of one token, m a shift, s = sum exp(z - m), u = sum exp(z - m) (z - m):

    log p_y = (z_y - m) - log s            H = log s - u / s

The usual shift is the row's maximum, and costs two passes over the logits, as many as all the rest. It is needed
against overflow alone: where s shows that 0 was a safe shift, 0 it is. Rows are walked in blocks that stay in the cache
between the exponential and the sum: the chunk passes through memory once. An accelerator's own way is `kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# On a CPU a block should fit the second-level cache; elsewhere it only bounds temporaries, and few launches count.
BLOCK_BYTES = {"cpu": 2**19}
BLOCK_BYTES_ELSEWHERE = 2**25

# Stands for the maximum over no logits at all. Finite, so that (it - a real maximum) * 0 is 0 and not NaN.
LOWEST = -1e30

# Sums of unshifted exponentials in between leave fp32 and bf16 room on both sides for what they are multiplied with.
# Logits from -40 to 46 pass. fp16 has no such room.
SAFE_SUMS = (1e-20, 1e20)


@dataclass(frozen=True, slots=True)
class ChunkStatistics:
    """Softmax statistics over the whole vocabulary, each fp32 (fp64) `[C]`."""

    logprobs: Tensor
    shift: Tensor  # over all ranks
    exp_sum: Tensor  # sum of exp(z - shift) over all ranks
    local_shift: Tensor  # of this rank; what its stored exponentials are relative to
    entropies: Tensor | None = None


def row_blocks(matrix: Tensor, *columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """`matrix` `[C, V]` a few rows at a time, at least one, and the same rows of `columns`, each `[C]`, as `[n, 1]`."""
    block_bytes = BLOCK_BYTES.get(matrix.device.type, BLOCK_BYTES_ELSEWHERE)
    step = max(1, block_bytes // max(1, matrix.shape[1] * matrix.element_size()))
    return zip(matrix.split(step), *(column[:, None].split(step) for column in columns), strict=True)


def unshifted_statistics(logits: Tensor, columns: Tensor, owned: Tensor) -> Tensor | None:
    """`local_statistics` with a shift of 0: `logits` hold exp(z) afterwards. None where that was not safe."""
    packed = logits.new_zeros(3, logits.shape[0])
    packed[2] = target_logits(logits, columns, owned)
    for block, exp_sum in row_blocks(logits, packed[1]):
        torch.sum(block.exp_(), 1, keepdim=True, out=exp_sum)
    # NaN passes: such rows are the caller's to leave out, and no shift would help them.
    unsafe = (packed[1] < SAFE_SUMS[0]) | (packed[1] > SAFE_SUMS[1])
    return None if bool(unsafe.any()) else packed


def local_statistics(
    logits: Tensor, columns: Tensor, owned: Tensor, *, entropy: bool = False, keep_logits: bool = False
) -> Tensor:
    """This rank's statistics of `logits` `[C, V]`, packed `[3, C]`, or `[4, C]` with `entropy`: m, s, z_y, u.

    m is the maximum. `columns` int64 `[C]` are the targets as columns of this shard, valid where `owned`; z_y is 0
    where another rank owns the target. Unless `keep_logits`, `logits` hold exp(z - m) afterwards.
    """
    packed = logits.new_zeros(4 if entropy else 3, logits.shape[0])
    if logits.shape[1] == 0:
        packed[0] = LOWEST
        return packed
    packed[2] = target_logits(logits, columns, owned)
    for block, maximum, exp_sum, weighted_sum in row_blocks(logits, packed[0], packed[1], packed[-1]):
        torch.amax(block, 1, keepdim=True, out=maximum)
        shifted = block - maximum if keep_logits else block.sub_(maximum)
        exponentials = shifted.exp() if entropy else shifted.exp_()
        torch.sum(exponentials, 1, keepdim=True, out=exp_sum)
        if entropy:
            torch.sum(shifted.mul_(exponentials), 1, keepdim=True, out=weighted_sum)
            if not keep_logits:
                block.copy_(exponentials)
    return packed


def target_logits(logits: Tensor, columns: Tensor, owned: Tensor) -> Tensor:
    return torch.where(owned, logits.gather(1, columns[:, None]).squeeze(1), 0)


def combine(gathered: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(log-probs, shift, exp_sum, entropies or None) from every rank's packed statistics `[ranks, 3 or 4, C]`."""
    shifts, exp_sums, targets = gathered[:, 0], gathered[:, 1], gathered[:, 2]
    shift = shifts.amax(0)
    weights = torch.exp(shifts - shift)
    exp_sum = (weights * exp_sums).sum(0)
    # In fp64: with a shift of 0 both terms may be large and their difference small. Rounding may leave it above 0.
    logprobs = ((targets.sum(0) - shift) - exp_sum.double().log()).clamp(max=0).to(gathered.dtype)
    if gathered.shape[1] == 3:
        return logprobs, shift, exp_sum, None
    weighted = (weights * (gathered[:, 3] + exp_sums * (shifts - shift))).sum(0)
    return logprobs, shift, exp_sum, exp_sum.log() - weighted / exp_sum


def exponentials_(logits: Tensor, shift: Tensor) -> None:
    """`logits` `[C, V]` become exp(z - shift)."""
    is_shifted = bool((shift != 0).any())
    for block, amount in row_blocks(logits, shift):
        if is_shifted:
            block.sub_(amount)
        block.exp_()


def weighted_exponentials_(logits: Tensor, shift: Tensor, constant: Tensor, slope: Tensor) -> None:
    """`logits` `[C, V]` become exp(d) * (constant + slope * d) with d = z - shift; the last three are `[C]`."""
    for block, amount, offset, factor in row_blocks(logits, shift, constant, slope):
        exponentials = block.sub_(amount).exp()
        block.mul_(factor).add_(offset).mul_(exponentials)


def compact_(matrix: Tensor, live: Tensor, num_live: int) -> Tensor:
    """Bring the live rows of `[C, V]` to its front, moving as few as possible; returns where each came from, `[n]`."""
    order = torch.arange(num_live, device=live.device)
    holes = (~live[:num_live]).nonzero().squeeze(1)
    movers = live[num_live:].nonzero().squeeze(1) + num_live
    order[holes] = movers
    if matrix.shape[1]:
        for _, hole, mover in row_blocks(matrix[: holes.numel()], holes, movers):
            matrix[hole[:, 0]] = matrix[mover[:, 0]]
    return order


def narrow_(matrix: Tensor, dtype: torch.dtype, form: Callable[[slice, Tensor], None]) -> Tensor:
    """A contiguous `[C, V]` matrix becomes one of a narrower dtype inside its own storage; the wide values are gone.

    `form(rows, out)` fills `out` `[n, V]` of `dtype` from those rows of `matrix`. Rows are formed in the place of rows
    that are used up, twice as many each time in half precision; the first few have none, and go through a copy.
    """
    if dtype == matrix.dtype:
        form(slice(0, matrix.shape[0]), matrix)
        return matrix
    num_rows, width = matrix.shape
    narrow = matrix.view(-1).view(dtype)[: matrix.numel()].view(num_rows, width)
    done = min(num_rows, 1 + num_rows // 64)
    first = matrix.new_empty(done, width, dtype=dtype)
    form(slice(0, done), first)
    narrow[:done] = first
    while done < num_rows:
        stop = min(num_rows, done * (matrix.element_size() // narrow.element_size()))
        form(slice(done, stop), narrow[done:stop])
        done = stop
    return narrow
