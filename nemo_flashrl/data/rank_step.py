"""One rank's share of an optimizer step: how it comes from the collecting rank, and what a callback may change of it.

Of a microbatch a rank gets what its pipeline stage reads. The first stage reads tokens, the last one what the loss is
made of, the stages between them the bounds of sequences. A tensor that a rank does not read keeps its name, shape and
type and costs nothing: one zero, seen from everywhere.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nemo_flashrl import platform
from nemo_flashrl.algorithms.advantages import Credit
from nemo_flashrl.records import Batch

Microbatch = dict[str, Tensor]
# What is taken off the rewards, [B] -> what is trained on, its metrics, and the advantages as in `RankStep`.
Assign = Callable[[Tensor], tuple[Credit, dict[str, float], list[float]]]

FIRST_STAGE = ("tokens",)
BOTH_ENDS = ("position_ids",)  # of embeddings, and of context-parallel losses
LAST_STAGE = ("targets", "target_mask", "behavior_logprobs", "row_index", "token_advantages")


@dataclass
class RankStep:
    """From the data module, which makes it, to the end of the step, when its metrics are written.

    Callbacks change it through `report` and `reduce_rewards` alone; `build.build_callbacks` lists which does what.
    """

    microbatches: list[Microbatch]
    metrics: dict[str, float] = field(default_factory=dict)  # collector's and planner's; filled on every rank
    advantages: list[float] = field(default_factory=list)  # [B], NaN where left out; on the collecting rank alone
    batch: Batch | None = None  # on the collecting rank alone
    assign: Assign | None = None  # forms advantages anew; on the collecting rank alone
    rewards: Tensor | None = None  # float32 [B], of what is trained on; on the collecting rank alone
    error: BaseException | None = None  # why there is no step; raised on every rank
    _taken_off: Tensor | float = 0.0  # [B], of these rewards so far; on the collecting rank alone

    def report(self, numbers: Mapping[str, float]) -> None:
        """Add metrics of this step; global rank 0's are written."""
        self.metrics.update(numbers)

    def reduce_rewards(self, microbatches: list[Microbatch], amounts: Tensor | None) -> None:
        """Take `amounts` [B], of the trajectories that are trained on, off their rewards; several callbacks' add up.

        Advantages and weights are formed anew: `microbatches` change in place, and so do the step's metrics. A
        collective over all ranks; `amounts` are looked at on global rank 0.
        """
        box: list[tuple[Tensor, Tensor, dict[str, float]] | None] = [None]
        if torch.distributed.get_rank() == 0:
            self._taken_off = self._taken_off + amounts
            credit, metrics, self.advantages = self.assign(self._taken_off)
            box = [(credit.advantages, credit.token_weights, metrics)]
        torch.distributed.broadcast_object_list(box, src=0, group=platform.object_group())
        advantages, weights, metrics = box[0]
        for microbatch in microbatches:
            places = microbatch["trajectory"]
            for name, values in (("advantages", advantages), ("token_weights", weights)):
                own = torch.where(places >= 0, values[places.clamp(min=0)], 0)
                microbatch[name] = own.to(microbatch[name])
        self.report(metrics)


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
