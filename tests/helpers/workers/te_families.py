"""The five families in Megatron's layers of Transformer Engine against its local ones and transformers, on a CPU."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny import FAMILIES, write_model

from nemo_flashrl import platform

platform.install()

from megatron.core import parallel_state
from nemo.collections.llm.gpt.model import base

from nemo_flashrl.algorithms.flash_reinforce import FlashReinforce
from nemo_flashrl.models import HeadSettings, PolicyModel
from nemo_flashrl.models.families import nemo_config

VOCABULARY, LENGTHS = 515, (10, 14)
TOKENS = sum(LENGTHS)


def main() -> dict:
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, 1)
    with tempfile.TemporaryDirectory() as models:
        return {family: compared(family, write_model(Path(models) / family, family)) for family in FAMILIES}


def compared(family: str, folder: Path) -> dict:
    ids = torch.randint(0, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    bounds = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    packed = {
        "tokens": ids,
        "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None],
        "targets": ids.roll(-1, 1),
        "cu_seqlens": bounds,
        "max_seqlen": torch.tensor(max(LENGTHS), dtype=torch.int32),
    }
    rows = ids.view(2, -1)
    padded = {
        "tokens": rows,
        "position_ids": torch.arange(rows.shape[1]).expand_as(rows),
        "targets": rows.roll(-1, 1),
    }
    local, engine = (model_of(folder, in_engine) for in_engine in (False, True))
    found = {"class": type(engine.module.decoder.layers[0].self_attention.linear_qkv).__name__}
    found["experts"] = type(engine.module.decoder.layers[0].mlp).__name__
    if family in ("mixtral", "qwen3_moe"):
        found["experts"] = type(engine.module.decoder.layers[0].mlp.experts).__name__
    with torch.no_grad():
        hf = transformers.AutoModelForCausalLM.from_pretrained(folder)
        logits = torch.log_softmax(hf(rows).logits.double(), -1)
        expected = logits.gather(-1, padded["targets"][..., None])[..., 0]
        for name, batch in (("packed", packed), ("padded", padded)):
            answers = [model.score_step(batch) for model in (local, engine)]
            found[name] = float((answers[0] - answers[1]).abs().max())
        found["transformers"] = float((answers[1] - expected).abs().max())
    found["gradient"] = gradients_apart(local, engine, padded)
    keys = [{s.key for s in m.module.sharded_state_dict().values()} for m in (local, engine)]
    found["keys"] = sorted(key for key in keys[0] ^ keys[1] if "_extra_state" not in key)
    return found


def model_of(folder: Path, in_engine: bool, *, tensor: int = 1, **fields: Any) -> PolicyModel:
    """`fields` are of Megatron's configuration."""
    config = nemo_config(folder, context_length=64, tensor_parallel=tensor)
    for name, value in {"tensor_model_parallel_size": tensor, **fields}.items():
        setattr(config, name, value)
    if in_engine:  # as on a GPU
        config.transformer_layer_spec = base.transformer_engine_layer_spec
        config.moe_grouped_gemm = config.moe_permute_fusion = bool(config.num_moe_experts)
        config.apply_rope_fusion = True
    model = PolicyModel(config, FlashReinforce(), HeadSettings(VOCABULARY), hf_folder=folder)
    model.configure_model()
    return model


def gradients_apart(local: PolicyModel, engine: PolicyModel, batch: dict) -> float:
    """Largest difference of a parameter's gradient under the names that both have, relative to its own norm."""
    grads = []
    for model in (local, engine):
        (-model.score_step(batch).sum()).backward()
        grads.append({n: p.grad for n, p in model.module.named_parameters()})
    both = grads[0].keys() & grads[1].keys()
    assert "embedding.word_embeddings.weight" in both
    return max(float((grads[0][n] - grads[1][n]).norm() / grads[0][n].norm()) for n in both)
