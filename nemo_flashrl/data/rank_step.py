"""One rank's share of an optimizer step, and what a callback may change of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nemo_flashrl import platform
from nemo_flashrl.algorithms.advantages import Credit
from nemo_flashrl.records import Batch

Microbatch = dict[str, Tensor]
# What is taken off the rewards, [B] -> what is trained on, its metrics, and the advantages as in `RankStep`.
Assign = Callable[[Tensor], tuple[Credit, dict[str, float], list[float]]]


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
            places = microbatch["trajectory"].cpu()
            for name, values in (("advantages", advantages), ("token_weights", weights)):
                own = torch.where(places >= 0, values[places.clamp(min=0)], 0)
                microbatch[name] = own.to(microbatch[name])
        self.report(metrics)
