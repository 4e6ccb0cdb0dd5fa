"""The hidden state that each trajectory's first trained token is predicted from.

Legend: R = trajectories of a microbatch, G = rows, S = row length, H = hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from nemo.lightning.megatron_parallel import MegatronParallel
from torch import Tensor

from nemo_flashrl.models.policy_head import find_head
from nemo_flashrl.models.scoring import score


def first_states(pipeline: MegatronParallel, microbatches: Sequence[dict[str, Tensor]]) -> list[Tensor] | None:
    """float32 [R, H] a microbatch on the last pipeline stage, None on others; a pass without gradient, a collective.

    Zeros stand for a trajectory without a trained token.
    """
    head, seen = find_head(pipeline.module), []

    def keep(_: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        hidden = arguments[0]  # [S, G, H], or this rank's part of S
        if head.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden)
        places, known = first_places(microbatches[len(seen)])
        states = hidden.reshape(-1, hidden.shape[-1])[places].float()
        seen.append(torch.where(known[:, None], states, 0).cpu())

    hook = head.register_forward_pre_hook(keep) if head is not None else None
    try:
        score(pipeline, microbatches)
    finally:
        if hook is not None:
            hook.remove()
    return seen or None


def first_places(microbatch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Where each trajectory's first trained token is predicted, int64 [R] in the head's order; if at all, [R]."""
    mask, count = microbatch["target_mask"], len(microbatch["advantages"])
    rows, length = mask.shape
    places = torch.arange(mask.numel(), device=mask.device).view_as(mask)
    beyond = torch.full((count,), mask.numel(), device=mask.device)
    first = beyond.scatter_reduce(0, microbatch["row_index"][mask], places[mask], "amin")
    known = first < mask.numel()
    first = torch.where(known, first, 0)
    return first % length * rows + first // length, known
