"""Training with a look at everything that a checkpoint holds: weights, moments and reference under HF names."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import lightning.pytorch as pl
import torch

from nemo_flashrl import platform
from nemo_flashrl.build import build_callbacks, build_data, build_driver, build_model, build_trainer
from nemo_flashrl.callbacks import EMAReferenceCallback, PassAgreementCallback
from nemo_flashrl.config import load
from nemo_flashrl.preflight.prepare import prepare
from nemo_flashrl.train import resume
from nemo_flashrl.weights.shards import stream_hf_tensors, unwrap


class Look(pl.Callback):
    """Writes the whole state to a file, the optimizer's settings to another beside it: of a resumed run that trains
    no step before its first, else after the last."""

    def __init__(self, out: Path, vocab_size: int) -> None:
        self.out, self.vocab_size = out, vocab_size

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.write(trainer, pl_module)

    def write(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        state = trainer.optimizers[0].mcore_optimizer.chained_optimizers[0].optimizer.state
        shadow = next(c for c in trainer.callbacks if isinstance(c, EMAReferenceCallback)).shadow
        names = {id(parameter): name for name, parameter in shadow.parameters.items()}
        kinds = {
            "weight": torch.Tensor.detach,
            "exp_avg": lambda p: state[p]["exp_avg"],
            "exp_avg_sq": lambda p: state[p]["exp_avg_sq"],
            "reference": lambda p: shadow.values[names[id(p)]],
        }
        found = {}
        for kind, value in kinds.items():
            for name, tensor in stream_hf_tensors(unwrap(pl_module), self.vocab_size, value):
                found[f"{kind} {name}"] = tensor.clone()
        if trainer.is_global_zero:
            torch.save(found, self.out)
            groups = [{k: v for k, v in g.items() if k != "params"} for g in trainer.optimizers[0].param_groups]
            self.out.with_suffix(".json").write_text(json.dumps(groups))


def main(out: Path, *overrides: str, dropout: float = 0.0) -> None:
    config = load("rehearsal", list(overrides))
    parts = prepare(config, int(os.environ["WORLD_SIZE"]))
    platform.install()
    model = build_model(config, parts)
    model.config.attention_dropout = model.config.hidden_dropout = dropout
    driver = build_driver(config, parts) if os.environ["RANK"] == "0" else None
    data = build_data(config, parts, driver)
    look = Look(out, parts.vocab_size)
    callbacks = build_callbacks(config, parts, data, driver)
    documented = re.findall(r"^    (\w+)  +", build_callbacks.__doc__, re.M)
    present = [type(callback).__name__ for callback in callbacks]
    assert present == [name for name in documented if name in present]
    callbacks = [c for c in callbacks if not isinstance(c, PassAgreementCallback)]  # dropout is wanted here
    trainer = build_trainer(config, [look, *callbacks])
    resume(trainer, parts.folder)
    try:
        trainer.fit(model, datamodule=data)
        if trainer.global_step == parts.folder.step:  # restored and not trained
            look.write(trainer, model)
    finally:
        if driver is not None:
            driver.close()
