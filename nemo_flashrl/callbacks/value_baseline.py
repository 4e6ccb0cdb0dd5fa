"""A value head's prediction as baseline: V_i is taken off the reward of trajectory i before advantages are formed.

The policy's hidden states are gathered on global rank 0, which predicts, and then learns from what was earned.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from nemo.lightning.megatron_parallel import MegatronStep
from torch import Tensor

from nemo_flashrl import platform
from nemo_flashrl.algorithms.value_head import ValueHead
from nemo_flashrl.config.schema import ValueHeadConfig
from nemo_flashrl.models.scoring import first_states


class ValueBaselineCallback(pl.Callback):
    """Owns the value head; its state goes into every checkpoint."""

    def __init__(self, head: ValueHead) -> None:
        self.head = head

    def on_megatron_microbatches_start(self, step: MegatronStep) -> None:
        """Before the microbatches are trained on."""
        microbatches = list(step.data)
        step.data = iter(microbatches)
        batch = _on_first_rank(microbatches, first_states(step.pipeline, microbatches))
        current, values, numbers = step.trainer.datamodule.current_step, None, {}
        if batch is not None:
            values = self.head.predict(batch)
            loss = self.head.update(batch, current.rewards)
            numbers = {"value_loss": loss, "value_mean": float(values.mean())}
        current.reduce_rewards(microbatches, values)
        current.report(numbers)

    def state_dict(self) -> dict[str, Any]:
        """Lightning's hook; global rank 0's is the one that is kept."""
        return self.head.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Lightning's hook."""
        self.head.load_state_dict(state_dict)


def value_baseline(settings: ValueHeadConfig) -> list[pl.Callback]:
    """The callback that a configuration asks for; nothing where it asks for none."""
    return [ValueBaselineCallback(ValueHead(**vars(settings)))] if settings.learning_rate else []


def _on_first_rank(microbatches: list[dict[str, Tensor]], states: list[Tensor] | None) -> Tensor | None:
    """The states [B, H] by the trajectories' places, on global rank 0; None elsewhere."""
    own: dict[int, Tensor] = {}
    for microbatch, part in zip(microbatches, states or (), strict=states is not None):
        rows = (row.clone() for row in part)  # a view is sent with all of what it is a view of
        own |= dict(zip(microbatch["trajectory"].tolist(), rows, strict=True))
    first = torch.distributed.get_rank() == 0
    everyone: list[Any] | None = [None] * torch.distributed.get_world_size() if first else None
    torch.distributed.gather_object(own, everyone, dst=0, group=platform.object_group())
    if everyone is None:
        return None
    known = {place: state for part in everyone for place, state in part.items() if place >= 0}
    return torch.stack([known[place] for place in sorted(known)])
