"""Softmax statistics of a chunk of logits, computed where the logits lie.

Legend: C = rows of a chunk, V = this rank's rows of the true vocabulary (0 on a rank that owns only padding).

With z the logits of one token, m their largest, s = sum exp(z - m), u = sum exp(z - m) (z - m):

    log p_y = (z_y - m) - log s            H = log s - u / s

Rows are walked in blocks that stay in the cache between the maximum, the exponential and the sum: the chunk then passes
through memory once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# On a CPU a block should fit the second-level cache; elsewhere it only bounds temporaries, and few launches count for
# more.
BLOCK_BYTES = {"cpu": 2**20}
BLOCK_BYTES_ELSEWHERE = 2**26

# Stands for the maximum over no logits at all. Finite, so that (it - a real maximum) * 0 is 0 and not NaN.
LOWEST = -1e30


@dataclass(frozen=True, slots=True)
class ChunkStatistics:
    """Softmax statistics over the whole vocabulary, each fp32 (fp64) `[C]`."""

    logprobs: Tensor
    maximum: Tensor  # over all ranks
    exp_sum: Tensor  # sum of exp(z - maximum) over all ranks
    local_maximum: Tensor  # of this rank; what its stored exponentials are relative to
    entropies: Tensor | None = None


def row_blocks(matrix: Tensor, *columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """`matrix` `[C, V]` a few rows at a time, at least one, with the same rows of `columns`, each `[C]`, as `[n, 1]`."""
    block_bytes = BLOCK_BYTES.get(matrix.device.type, BLOCK_BYTES_ELSEWHERE)
    step = max(1, block_bytes // max(1, matrix.shape[1] * matrix.element_size()))
    return zip(matrix.split(step), *(column[:, None].split(step) for column in columns), strict=True)


def local_statistics(
    logits: Tensor, columns: Tensor, owned: Tensor, *, entropy: bool, keep_logits: bool
) -> tuple[Tensor, Tensor]:
    """This rank's statistics of `logits` `[C, V]`, packed `[3, C]`, or `[4, C]` with `entropy`, and its maximum `[C]`.

    The lines are m, s, the target's logit (0 where another rank owns it), u. `columns` int64 `[C]` are the targets as
    columns of this shard, valid where `owned`. Unless `keep_logits`, `logits` hold exp(z - m) afterwards.
    """
    num_rows, width = logits.shape
    packed = logits.new_zeros(4 if entropy else 3, num_rows)
    if width == 0:
        packed[0] = LOWEST
        return packed, packed[0]
    packed[2] = torch.where(owned, logits.gather(1, columns[:, None]).squeeze(1), 0)
    for block, maximum, exp_sum, weighted_sum in row_blocks(logits, packed[0], packed[1], packed[-1]):
        torch.amax(block, 1, keepdim=True, out=maximum)
        if not entropy and not keep_logits:
            torch.sum(block.sub_(maximum).exp_(), 1, keepdim=True, out=exp_sum)
            continue
        shifted = block - maximum if keep_logits else block.sub_(maximum)
        exponentials = shifted.exp()
        torch.sum(exponentials, 1, keepdim=True, out=exp_sum)
        if entropy:
            torch.sum(shifted.mul_(exponentials), 1, keepdim=True, out=weighted_sum)
        if not keep_logits:
            block.copy_(exponentials)
    return packed, packed[0]


def combine(gathered: Tensor, local_maximum: Tensor) -> ChunkStatistics:
    """Statistics over the whole vocabulary from every rank's packed ones, `[ranks, 3 or 4, C]`."""
    maxima, exp_sums, target_logits = gathered[:, 0], gathered[:, 1], gathered[:, 2]
    maximum = maxima.amax(0)
    weights = torch.exp(maxima - maximum)
    exp_sum = (weights * exp_sums).sum(0)
    log_sum = exp_sum.log()
    logprobs = (target_logits.sum(0) - maximum) - log_sum
    if gathered.shape[1] == 3:
        return ChunkStatistics(logprobs, maximum, exp_sum, local_maximum)
    weighted = (weights * (gathered[:, 3] + exp_sums * (maxima - maximum))).sum(0)
    return ChunkStatistics(logprobs, maximum, exp_sum, local_maximum, log_sum - weighted / exp_sum)


def exponentials_(logits: Tensor, maximum: Tensor) -> None:
    """`logits` `[C, V]` become exp(z - maximum)."""
    for block, shift in row_blocks(logits, maximum):
        block.sub_(shift).exp_()


def weighted_exponentials_(logits: Tensor, maximum: Tensor, constant: Tensor, slope: Tensor) -> None:
    """`logits` `[C, V]` become exp(d) * (constant + slope * d) with d = z - maximum; the last three are `[C]`."""
    for block, shift, offset, factor in row_blocks(logits, maximum, constant, slope):
        exponentials = block.sub_(shift).exp()
        block.mul_(factor).add_(offset).mul_(exponentials)
