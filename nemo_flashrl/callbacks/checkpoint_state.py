"""What a checkpoint holds beside weights, optimizer, scheduler and counters: every rank's random generators, and the
tensors of callbacks that offer `sharded_state_dict(model)` and `load_shadow(dict)`.

Lightning's checkpoint dictionary carries them; Megatron writes what is sharded in parallel and reads it back at any
parallel sizes.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from nemo.lightning.io.pl import ckpt_to_weights_subdir

from nemo_flashrl import platform
from nemo_flashrl.weights.shards import unwrap


def add_to_checkpoint(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
    """Put what is described above into the dictionary that is about to be written; a collective over all ranks."""
    data = type(trainer.datamodule).__qualname__
    # The data module's state is known on rank 0 alone; what is not sharded has to be the same on all ranks.
    checkpoint[data] = trainer.strategy.broadcast(checkpoint.get(data))
    checkpoint["layout"] = _layout()
    checkpoint["random_generators"] = _of_this_rank(platform.random_state())
    checkpoint["sharded_callbacks"] = _sharded_callbacks(trainer)


def take_from_checkpoint(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """Hand callbacks what they saved; returns this rank's generators, None where the parallel sizes have changed."""
    for key, tensors in checkpoint.get("sharded_callbacks", {}).items():
        next(c for c in trainer.callbacks if c.state_key == key).load_shadow(tensors)
    return checkpoint.get("random_generators")


class RunStateIO(_WrappingCheckpointIO):
    """NeMo's checkpoint IO, asking on load for what `add_to_checkpoint` has put beside NeMo's own."""

    def __init__(self, checkpoint_io: Any, trainer: pl.Trainer) -> None:
        super().__init__(checkpoint_io)
        self.trainer = trainer

    def load_checkpoint(self, path: Any, sharded_state_dict: Any = None, **options: Any) -> dict[str, Any]:
        """As NeMo's; generators of other parallel sizes belong to no rank here and are left out."""
        common = dist_checkpointing.load_common_state_dict(str(ckpt_to_weights_subdir(path, is_saving=False)))
        sharded_state_dict["sharded_callbacks"] = _sharded_callbacks(self.trainer)
        if common["layout"] == _layout():
            sharded_state_dict["random_generators"] = _of_this_rank(None)
        return self.checkpoint_io.load_checkpoint(path, sharded_state_dict=sharded_state_dict, **options)


def _sharded_callbacks(trainer: pl.Trainer) -> dict[str, Any]:
    model = unwrap(trainer.lightning_module)
    return {c.state_key: c.sharded_state_dict(model) for c in trainer.callbacks if hasattr(c, "sharded_state_dict")}


def _of_this_rank(state: Any) -> ShardedObject:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    return ShardedObject("random_generators", state, (world,), (rank,))


def _layout() -> dict[str, int]:
    return {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "processes": torch.distributed.get_world_size(),
    }
