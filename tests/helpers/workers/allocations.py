"""What a training step of the real trainer allocates on a CPU, of each rank, by what holds it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import lightning.pytorch as pl
import torch

from nemo_flashrl import platform
from nemo_flashrl.callbacks import EMAReferenceCallback
from nemo_flashrl.models import PolicyModel
from workers.parity import Driver, make_run


class Counter(pl.Callback):
    """Bytes by what holds them, of this rank."""

    def __init__(self) -> None:
        self.saved: dict[int, int] = {}  # storage address -> bytes, of the microbatch with the most
        self.bytes: dict[str, int] = {}

    def on_train_batch_end(self, trainer, model, *_) -> None:
        self.bytes["weights"] = sum(p.nbytes for p in model.parameters())
        self.bytes["gradients"] = sum(p.main_grad.nbytes for p in model.parameters() if p.requires_grad)
        chained = [o for optimizer in trainer.optimizers for o in optimizer.mcore_optimizer.chained_optimizers]
        states = [s for o in chained for s in o.optimizer.state.values()]
        self.bytes["optimizer"] = sum(
            value.nbytes for s in states for name, value in s.items() if torch.is_tensor(value) and name != "step"
        )


def main(model_folder: Path, trajectories: Path, out: Path, vocab_size: int, *overrides: str) -> None:
    platform.install()
    counter = Counter()
    driver = Driver(trajectories) if os.environ["RANK"] == "0" else None
    reference = EMAReferenceCallback()
    trainer, model, data = make_run(model_folder, out, vocab_size, driver, [reference, counter], overrides, gate=False)
    forward = PolicyModel.forward_step

    def measured(self, batch):
        weights = {p.untyped_storage().data_ptr() for p in self.parameters()}

        def keep(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights and storage.data_ptr() not in counter.saved:
                counter.saved[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)  # alive, so that no address is used twice
            return tensor

        kept: list = []
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = forward(self, batch)
        counter.bytes["tokens"] = batch["tokens"].numel()
        return loss

    PolicyModel.forward_step = measured
    trainer.fit(model, datamodule=data)
    counter.bytes["host_reference"] = sum(value.nbytes for value in reference.shadow.values.values())
    counter.bytes["activations"] = sum(counter.saved.values())
    out.with_suffix(f".{torch.distributed.get_rank()}").write_text(json.dumps(counter.bytes))
