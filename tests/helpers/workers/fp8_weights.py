"""What the product tells NeMo and Megatron of FP8 weights, and what it does to such as stand in for them on a CPU."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import lightning.pytorch as pl
import torch
from fused_adam import install_fused_adam

from nemo_flashrl import build, platform
from nemo_flashrl.config import load
from nemo_flashrl.weights import hf_folder, lora
from nemo_flashrl.weights.shards import stream_hf_tensors, unwrap
from workers.parity import Driver, make_run

FIELDS = ("fp8", "fp8_recipe", "fp8_param", "fp8_param_gather", "grad_reduce_in_fp32")


class Look(pl.Callback):
    """Before the first step: what each stand-in was told that it began with, and what leaves for the sampler."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.begun, self.sent = vocab_size, {}, {}

    def on_train_start(self, trainer, model) -> None:
        begun = stream_hf_tensors(unwrap(model), self.vocab_size, lambda p: p.get_high_precision_init_val())
        self.begun = {name: tensor.clone() for name, tensor in begun}
        with mock.patch.object(lora, "is_float8tensor", lambda parameter: True):
            self.sent = {name: tensor.clone() for name, tensor in stream_hf_tensors(unwrap(model), self.vocab_size)}


def stand_ins(model):
    """The parameters, each with the two methods of Transformer Engine's that are called; `dequantize` gives twos."""
    for name, layer, parameter in real_parameters(model):
        begun = torch.zeros_like(parameter)
        parameter.get_high_precision_init_val = lambda begun=begun: begun
        parameter.dequantize = lambda parameter=parameter: torch.full_like(parameter, 2.0)
        yield name, layer, parameter


real_parameters = hf_folder.local_parameters


def main(model_folder: Path, trajectories: Path, out: Path, vocab_size: int) -> None:
    platform.install()
    overrides = [f"output={out.parent / 'unused'}", f"model.path={model_folder}", "model.precision=bf16"]
    config = load("rehearsal", [*overrides, "optimizer.fp8_param_gather=true", "optimizer.gradients_dtype=bf16"])
    with mock.patch.object(platform, "has_gpu", lambda: True):
        install_fused_adam()
        optimizer = build.build_optimizer_config(config)
    dtypes = build.build_trainer(config, []).precision_plugin.dtype_config
    told = {name: getattr(dtypes, name) for name in FIELDS}
    look, driver = Look(vocab_size), Driver(trajectories)
    with mock.patch.object(hf_folder, "local_parameters", stand_ins):
        trainer, model, data = make_run(model_folder, out, vocab_size, driver, [look], [])
        trainer.fit(model, datamodule=data)
    told["recipe of the optimizer"] = optimizer.fp8_recipe
    told["FusedAdam has masters"] = optimizer.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    torch.save({"told": told, "begun": look.begun, "sent": look.sent}, out)
