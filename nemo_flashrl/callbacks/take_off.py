"""What is known on the ranks alone, taken off the rewards before a step: advantages and weights are formed anew."""

from __future__ import annotations

import torch
from nemo.lightning.megatron_parallel import MegatronStep
from torch import Tensor

from nemo_flashrl import platform


def take_off_rewards(
    step: MegatronStep, microbatches: list[dict[str, Tensor]], amounts: Tensor | None
) -> dict[str, float]:
    """Take `amounts` [B], of the trajectories that are trained on, off their rewards; several callbacks' add up.

    A collective over all ranks; `amounts` are looked at on global rank 0. Changes `microbatches` in place; returns what
    the step's metrics then are.
    """
    last, box = step.trainer.datamodule.last_step, [None]
    if torch.distributed.get_rank() == 0:
        last.taken_off = last.taken_off + amounts
        credit, metrics, last.advantages = last.assign(last.taken_off)
        box = [(credit.advantages, credit.token_weights, metrics)]
    torch.distributed.broadcast_object_list(box, src=0, group=platform.object_group())
    advantages, weights, metrics = box[0]
    for microbatch in microbatches:
        places = microbatch["trajectory"].cpu()
        for name, values in (("advantages", advantages), ("token_weights", weights)):
            own = torch.where(places >= 0, values[places.clamp(min=0)], 0)
            microbatch[name] = own.to(microbatch[name])
    return metrics
