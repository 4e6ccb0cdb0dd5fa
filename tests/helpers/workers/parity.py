"""One training step of the real trainer at the parallel sizes given; writes loss and gradients under HF names."""

from __future__ import annotations

import os
import pickle
from math import inf
from pathlib import Path

import lightning.pytorch as pl
import torch

from nemo_flashrl.algorithms.flash_reinforce import FlashReinforce, FlashReinforceSettings
from nemo_flashrl.build import build_data, build_model, build_trainer
from nemo_flashrl.config import load
from nemo_flashrl.preflight.prepare import Parts
from nemo_flashrl.records import Batch


class Capture(pl.Callback):
    """Keeps the step's loss, its gradients before the optimizer touches them, and the parameters after it."""

    def __init__(self, out: Path, vocab_size: int) -> None:
        self.out, self.vocab_size, self.stats, self.gradients = out, vocab_size, {}, {}

    def on_megatron_reduce_microbatches_end(self, reduced, **_) -> None:
        self.stats = {name: float(value) for name, value in reduced.items()}

    def on_megatron_step_end(self, step, **_) -> None:
        from nemo_flashrl.weights.shards import stream_hf_tensors, unwrap

        ddp = step.pipeline.module.module
        if ddp.ddp_config.use_distributed_optimizer:
            gather_gradients(ddp)
        self.gradients = copies(stream_hf_tensors(unwrap(ddp), self.vocab_size, lambda p: p.main_grad))

    def on_train_batch_end(self, trainer, model, *_) -> None:
        from nemo_flashrl.weights.shards import stream_hf_tensors, unwrap

        parameters = copies(stream_hf_tensors(unwrap(model), self.vocab_size))
        everyone = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, self.stats)
        if torch.distributed.get_rank() == 0:
            stats = next(s for s in reversed(everyone) if s)
            torch.save({"gradients": self.gradients, "stats": stats, "parameters": parameters}, self.out)


def copies(named) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in named}


def gather_gradients(ddp) -> None:
    """The distributed optimizer has reduce-scattered them: each data-parallel rank holds the sum of its share alone."""
    for buffer in ddp.buffers:
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            own = bucket.grad_data.chunk(group.size())[group.rank()]
            torch.distributed.all_gather_into_tensor(bucket.grad_data, own.clone(), group=group)


class Driver:
    """Hands over trajectories that were made before."""

    def __init__(self, path: Path) -> None:
        self.trajectories = pickle.loads(path.read_bytes())

    def collect(self, version: int) -> Batch:
        return Batch(self.trajectories, version)


def make_run(model_folder: Path, out: Path, vocab_size: int, driver, callbacks, overrides, *, dropout=0.0, gate=True):
    """(trainer, model, data) of one step of FlashREINFORCE on what `driver` hands over."""
    config = load(
        "rehearsal",
        [f"output={out.parent / 'unused'}", f"model.path={model_folder}", "trainer.steps=1", *overrides],
    )
    algorithm = FlashReinforce(FlashReinforceSettings() if gate else FlashReinforceSettings(delta=inf, ratio_guard=inf))
    parts = Parts(algorithm, object, None, [], None, vocab_size, data_parallel=1)
    model = build_model(config, parts)
    model.config.attention_dropout = model.config.hidden_dropout = dropout
    return build_trainer(config, callbacks), model, build_data(config, parts, driver)


def main(
    model_folder: Path,
    trajectories: Path,
    out: Path,
    vocab_size: int,
    *overrides: str,
    dropout: float = 0.0,
    gate: bool = True,
    ddp: dict[str, int] | None = None,
) -> None:
    """`ddp`: fields of Megatron's DistributedDataParallelConfig."""
    driver = Driver(trajectories) if os.environ["RANK"] == "0" else None
    capture = Capture(out, vocab_size)
    trainer, model, data = make_run(
        model_folder, out, vocab_size, driver, [capture], overrides, dropout=dropout, gate=gate
    )
    for name, value in (ddp or {}).items():
        setattr(trainer.strategy.ddp_config, name, value)
    model.optim.config.use_distributed_optimizer = trainer.strategy.ddp_config.use_distributed_optimizer
    trainer.fit(model, datamodule=data)
