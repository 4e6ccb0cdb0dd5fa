"""One training step of the real trainer at the parallel sizes given; writes loss and gradients under HF names."""

from __future__ import annotations

import os
import pickle
from math import inf
from pathlib import Path

import lightning.pytorch as pl
import torch

from nemo_flashrl.algorithms.flash_reinforce import FlashReinforce, FlashReinforceSettings
from nemo_flashrl.config import load
from nemo_flashrl.preflight import Parts
from nemo_flashrl.records import Batch
from nemo_flashrl.train import build_data, build_model, build_trainer


class Capture(pl.Callback):
    """Keeps the step's loss, and its gradients before the optimizer touches them."""

    def __init__(self, out: Path, vocab_size: int) -> None:
        self.out, self.vocab_size, self.stats = out, vocab_size, {}

    def on_megatron_reduce_microbatches_end(self, reduced, **_) -> None:
        self.stats = {name: float(value) for name, value in reduced.items()}

    def on_megatron_step_end(self, step, **_) -> None:
        from nemo_flashrl.weights.shards import stream_hf_tensors, unwrap

        model = unwrap(step.pipeline.module)
        gradients = {n: t.clone() for n, t in stream_hf_tensors(model, self.vocab_size, lambda p: p.main_grad)}
        everyone = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, self.stats)
        if torch.distributed.get_rank() == 0:
            stats = next(s for s in reversed(everyone) if s)
            torch.save({"gradients": gradients, "stats": stats}, self.out)


class Driver:
    """Hands over trajectories that were made before."""

    def __init__(self, path: Path) -> None:
        self.trajectories = pickle.loads(path.read_bytes())

    def collect(self, version: int) -> Batch:
        return Batch(self.trajectories, version)


def main(
    model_folder: Path,
    trajectories: Path,
    out: Path,
    vocab_size: int,
    *overrides: str,
    dropout: float = 0.0,
    gate: bool = True,
) -> None:
    config = load(
        "rehearsal",
        [f"output={out.parent / 'unused'}", f"model.path={model_folder}", "trainer.steps=1", *overrides],
    )
    algorithm = FlashReinforce(FlashReinforceSettings() if gate else FlashReinforceSettings(delta=inf, ratio_guard=inf))
    parts = Parts(algorithm, object, None, [], None, vocab_size, data_parallel=1)
    model = build_model(config, parts)
    model.config.attention_dropout = model.config.hidden_dropout = dropout
    data = build_data(config, parts, Driver(trajectories) if os.environ["RANK"] == "0" else None)
    trainer = build_trainer(config, [Capture(out, vocab_size)])
    trainer.fit(model, datamodule=data)
