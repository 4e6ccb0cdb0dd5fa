"""Which tokens of a trajectory each context-parallel rank holds: Megatron's load-balanced layout.

A sequence is cut into 2 * CP equal chunks; rank i holds chunks i and 2 * CP - 1 - i, so that all ranks have the same
work under a causal mask. Targets, masks and log-probs are shifted over the whole sequence before it is cut.

    CP = 2, eight tokens     rank 0: | 0 1 | 6 7 |     rank 1: | 2 3 | 4 5 |

Legend: R = rows of a microbatch, S = row length, CP = context-parallel size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def length_multiple(tensor: int, sequence: bool, context: int, fp8: bool = False) -> int:
    """What every sequence's length has to be a multiple of, at these parallel sizes.

    A rank's share is two equal chunks, and under sequence parallelism that share is cut into `tensor` pieces again. A
    product of FP8 matrices sums over a multiple of 16 tokens.
    """
    shards = math.lcm(tensor if sequence else 1, 16 if fp8 else 1)
    return context * math.lcm(2, shards) if context > 1 else shards


def held_positions(length: int, rank: int, size: int) -> Tensor:
    """int64 [length / size]: the positions of one sequence that this rank holds, in its own order."""
    assert size == 1 or length % (2 * size) == 0, f"{length} tokens do not make {2 * size} equal chunks"
    if size == 1:
        return torch.arange(length)
    chunks = torch.arange(length).view(2 * size, -1)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def context_share(microbatch: dict[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    """This rank's part of a microbatch: its positions of every row, or of every segment of a packed row.

    Fields of the shape of `tokens` are cut. `cu_seqlens` and `max_seqlen` go on describing whole sequences, as Megatron
    and Transformer Engine want them.
    """
    if size == 1:
        return microbatch
    shape = microbatch["tokens"].shape
    bounds = microbatch["cu_seqlens"] if "cu_seqlens" in microbatch else [0, shape[1]]
    pieces = [
        int(begin) + held_positions(int(end) - int(begin), rank, size)
        for begin, end in zip(bounds[:-1], bounds[1:], strict=True)
    ]
    held = torch.cat(pieces)
    return {name: value[:, held] if value.shape == shape else value for name, value in microbatch.items()}
