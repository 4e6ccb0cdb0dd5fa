"""Adapters beside Transformer Engine's layers against those beside Megatron's local ones, on two ranks of a CPU."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from megatron.core import parallel_state
from nemo.collections.llm.gpt.model import base
from tiny import write_model

from nemo_flashrl.algorithms.flash_reinforce import FlashReinforce
from nemo_flashrl.models import HeadSettings, PolicyModel
from nemo_flashrl.models.families import nemo_config
from nemo_flashrl.weights.lora import LoraSettings
from workers.te_families import VOCABULARY


def main() -> dict:
    """Largest difference of an adapter's gradient, relative to its norm, and how many there are."""
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(2, 1)
    ids = torch.randint(0, VOCABULARY, (1, 24), generator=torch.Generator().manual_seed(1))
    batch = {"tokens": ids, "position_ids": torch.arange(24)[None], "targets": ids.roll(-1, 1)}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), "llama")
        local, engine = (gradients(folder, batch, in_engine) for in_engine in (False, True))
    assert local.keys() == engine.keys()
    apart = {name: float((local[name] - engine[name]).norm() / local[name].norm()) for name in local}
    worst = max(apart, key=apart.get)
    return {"worst": [worst, apart[worst]], "adapters": len(apart)}


def gradients(folder: str, batch: dict, in_engine: bool) -> dict[str, torch.Tensor]:
    config = nemo_config(folder, context_length=64, tensor_parallel=2)
    config.tensor_model_parallel_size, config.sequence_parallel = 2, True
    if in_engine:
        config.transformer_layer_spec = base.transformer_engine_layer_spec
    head, lora = HeadSettings(VOCABULARY), LoraSettings(rank=4, targets=("linear_qkv", "linear_proj", "linear_fc1"))
    model = PolicyModel(config, FlashReinforce(), head, hf_folder=folder, lora=lora)
    model.configure_model()
    adapters = {name: p for name, p in model.module.named_parameters() if ".adapter." in name}
    for number, (_, parameter) in enumerate(sorted(adapters.items())):
        torch.manual_seed(number)  # both factors, so that each has a gradient
        parameter.data.normal_(std=0.2)
    (-model.score_step(batch).sum()).backward()
    return {name: parameter.grad.clone() for name, parameter in adapters.items()}
