"""Steps of the real trainer over Transformer Engine's layers and the distributed optimizer, saved and resumed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.optimizer import distrib_optimizer
from nemo.collections.llm.gpt.model import base

from nemo_flashrl import platform
from nemo_flashrl.callbacks.checkpoint import RunStateIO, add_to_checkpoint, take_from_checkpoint
from nemo_flashrl.weights.shards import stream_hf_tensors, unwrap
from workers.optimizer_on_host import SavedDriver
from workers.parity import copies, make_run

STATE = ("param", "exp_avg", "exp_avg_sq")


class Watched(pl.Callback):
    """Weights and optimizer state under Hugging Face's names: as they were loaded, and after each step.

    Saves after the first step, then as Megatron does by default, and counts what this rank gathers in each save.

    Counts too what host memory a load holds when it has read all.
    """

    def __init__(self, vocab_size: int, save: str | None) -> None:
        self.vocab_size, self.save = vocab_size, save
        self.begun: dict[str, Any] = {}
        self.steps: list[dict[str, Any]] = []
        self.gathered: list[dict[str, int]] = []
        self.read = 0

    def setup(self, trainer, model, stage) -> None:
        checkpoint_io = RunStateIO(trainer.strategy.checkpoint_io, trainer)
        trainer.strategy.checkpoint_io = checkpoint_io
        load = checkpoint_io.load_checkpoint

        def load_checkpoint(path, sharded_state_dict, **options):
            # Ranks exchange what they have read over the GPU: on the way back it is a copy.
            with mock.patch.object(torch.Tensor, "cuda", lambda self, *_, **__: self.clone()):
                loaded = load(path, sharded_state_dict, **options)
            asked = [shard.data for shard in nested_values(sharded_state_dict["optimizer"]) if is_tensor(shard)]
            held = [*asked, *filter(torch.is_tensor, nested_values(loaded["optimizer"]))]
            self.read = storage_bytes(held)
            return loaded

        checkpoint_io.load_checkpoint = load_checkpoint

    def on_save_checkpoint(self, trainer, model, checkpoint) -> None:
        add_to_checkpoint(trainer, checkpoint)

    def on_load_checkpoint(self, trainer, model, checkpoint) -> None:
        take_from_checkpoint(trainer, checkpoint)

    def on_train_start(self, trainer, model) -> None:
        self.begun = self.held(trainer, model)

    def on_train_batch_end(self, trainer, model, *_) -> None:
        self.steps.append(self.held(trainer, model))
        if self.save and len(self.steps) == 1:
            own = counted(lambda: trainer.save_checkpoint(self.save))
            with mock.patch.object(trainer.strategy, "distrib_optim_fully_reshardable_mem_efficient", False):
                self.gathered = [own, counted(lambda: trainer.save_checkpoint(f"{self.save}.default"))]

    def held(self, trainer, model) -> dict[str, Any]:
        state = whole_state(trainer)
        found = {"weights": copies(stream_hf_tensors(unwrap(model), self.vocab_size))}
        for row, name in enumerate(STATE if state else ()):
            shards = stream_hf_tensors(unwrap(model), self.vocab_size, lambda p, row=row: state[p][row].view_as(p))
            found[name] = copies(shards)
        return found


@torch.no_grad()
def whole_state(trainer: pl.Trainer) -> dict[torch.nn.Parameter, torch.Tensor]:
    """fp32 weight and moments [3, numel] of each parameter here, summed over the ranks that have a share of it."""
    whole = {}
    for optimizer in trainer.optimizers[0].mcore_optimizer.chained_optimizers:
        assert isinstance(optimizer, distrib_optimizer.DistributedOptimizer)
        for parameter in (p for buffer in optimizer.buffers for p in buffer.params):
            whole[parameter] = torch.zeros(len(STATE), parameter.numel())
            if parameter in optimizer.model_param_gbuf_map and optimizer.optimizer.state:
                own = optimizer._get_model_param_range_map(parameter)["param"]
                state = optimizer._get_main_param_and_optimizer_states(parameter)
                for row, name in zip(whole[parameter], STATE, strict=True):
                    row[own.start : own.end] = state[name]
            torch.distributed.all_reduce(whole[parameter], group=optimizer.data_parallel_group)
    return whole


def is_tensor(shard: Any) -> bool:
    return isinstance(shard, ShardedTensor)


def storage_bytes(tensors: list[torch.Tensor]) -> int:
    """Of the storages under them, once each."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def counted(save) -> dict[str, int]:
    """Bytes of optimizer state that this rank receives from the others in `save()`, sends, and copies to write them."""
    found = {"received": 0, "sent": 0, "copied": 0}
    gather, all_gather = torch.distributed.gather, torch.distributed.all_gather
    prepare = FileSystemWriterAsync.prepare_write_data

    def count_copies(writer, *arguments) -> None:
        prepare(writer, *arguments)
        written = [pair for *_, (_, tensors) in writer.write_buckets for pair in tensors]
        state = [tensor for item, tensor in written if item.index.fqn.startswith("optimizer.state.")]
        found["copied"] += storage_bytes(state)

    def count(sent, received) -> None:
        found["sent"] += sent.nbytes
        found["received"] += sum(tensor.nbytes for tensor in received or ())

    def one_gathers(tensor, gather_list=None, *arguments, **options):
        count(tensor, gather_list)
        return gather(tensor, gather_list, *arguments, **options)

    def all_gather_it(tensors, tensor, *arguments, **options):
        count(tensor, tensors)
        return all_gather(tensors, tensor, *arguments, **options)

    torch.distributed.gather, torch.distributed.all_gather = one_gathers, all_gather_it
    try:
        with mock.patch.object(FileSystemWriterAsync, "prepare_write_data", count_copies):
            save()
    finally:
        torch.distributed.gather, torch.distributed.all_gather = gather, all_gather
    return found


def main(
    folder: str,
    trajectories: str,
    out: str,
    vocab_size: int,
    overrides: list[str],
    save: str | None = None,
    resume: str | None = None,
) -> dict:
    """Rank 0 writes what was held to `out`. Returns counts by rank, of two saves or a load, and what saves are told."""
    platform.install()
    driver = SavedDriver(Path(trajectories)) if os.environ["RANK"] == "0" else None
    watched = Watched(vocab_size, save)
    trainer, model, data = make_run(Path(folder), Path(out), vocab_size, driver, [watched], overrides, gate=False)
    model.config.transformer_layer_spec = base.transformer_engine_layer_spec
    model.config.gradient_accumulation_fusion = model.config.apply_rope_fusion = True
    trainer.strategy.ddp_config.use_distributed_optimizer = model.optim.config.use_distributed_optimizer = True
    trainer.fit(model, datamodule=data, ckpt_path=resume)
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, (watched.gathered, watched.read))
    gathered, read = zip(*everyone, strict=True)
    if torch.distributed.get_rank() == 0:
        torch.save({"begun": watched.begun, "steps": watched.steps}, out)
    engine = unwrap(model).decoder.layers[0].self_attention.linear_qkv
    metadata = trainer.strategy.sharded_state_dict_metadata
    parameters = sum(p.numel() for p in model.parameters())
    counts = {"gathered": gathered, "read": read, "parameters": parameters}
    return counts | {"layers": type(engine).__name__, "metadata": metadata}
