"""From the collecting rank to all: each rank its own share, and of a microbatch what its pipeline stage reads.

The first stage reads tokens, the last one what the loss is made of, the stages between them the bounds of sequences. A
tensor that a rank does not read keeps its name, shape and type and costs nothing: one zero, seen from everywhere.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FIRST_STAGE = ("tokens",)
BOTH_ENDS = ("position_ids",)  # of embeddings, and of context-parallel losses
LAST_STAGE = ("targets", "target_mask", "behavior_logprobs", "row_index", "token_advantages")


def stage_share(microbatch: dict[str, Tensor], *, first: bool, last: bool) -> dict[str, Tensor]:
    """The microbatch for a rank that holds the first pipeline stage, or the last, or both, or neither."""
    unread = (*FIRST_STAGE * (not first), *BOTH_ENDS * (not (first or last)), *LAST_STAGE * (not last))
    held = {name: microbatch[name] for name in unread if name in microbatch}
    return microbatch | {name: torch.zeros((), dtype=v.dtype).expand(v.shape) for name, v in held.items()}


def scatter(shares: Sequence[Any], group: torch.distributed.ProcessGroup) -> Any:
    """`shares[rank]` of the group's rank 0, on each rank; elsewhere `shares` is not looked at. A collective.

    Unlike `scatter_object_list`, which sends every rank as many bytes as the largest share has, each gets its own;
    ranks that are given one and the same object cost one pickle. Rank 0 keeps its own as it is.
    """
    payloads: list[bytes] = []
    sizes = torch.zeros(group.size(), dtype=torch.int64)
    if group.rank() == 0:
        pickled = {id(share): pickle.dumps(share, pickle.HIGHEST_PROTOCOL) for share in shares[1:]}
        payloads = [b"", *(pickled[id(share)] for share in shares[1:])]
        sizes = torch.tensor([len(payload) for payload in payloads])
    torch.distributed.broadcast(sizes, group_src=0, group=group)
    if group.rank() == 0:
        buffers = [torch.frombuffer(bytearray(payload), dtype=torch.uint8) for payload in payloads[1:]]
        sent = [torch.distributed.isend(b, group_dst=rank, group=group) for rank, b in enumerate(buffers, 1)]
        for request in sent:
            request.wait()
        return shares[0]
    buffer = torch.empty(int(sizes[group.rank()]), dtype=torch.uint8)
    torch.distributed.recv(buffer, group_src=0, group=group)
    return pickle.loads(buffer.numpy().tobytes())
