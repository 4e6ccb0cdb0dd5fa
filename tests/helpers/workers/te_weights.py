"""A folder's weights into Transformer Engine's own layers and back, on a CPU, for the five families."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from tiny import FAMILIES, write_model

from nemo_flashrl import platform

platform.install()

from megatron.core import parallel_state

from nemo_flashrl.weights.shards import stream_hf_tensors
from workers.te_families import VOCABULARY, model_of

EXPERTS = ("mixtral", "qwen3_moe")


def main(tensor: int = 1) -> dict:
    """Of every family, on rank 0; the experts of other ranks than one are spread, each whole on its rank."""
    torch.cuda.is_available = lambda: True  # Transformer Engine asks before it makes a layer; this package has asked
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tensor, 1, expert_model_parallel_size=tensor, expert_tensor_parallel_size=1
    )
    with tempfile.TemporaryDirectory() as models:
        return {family: there_and_back(family, Path(models) / family, tensor) for family in FAMILIES}


def there_and_back(family: str, folder: Path, tensor: int) -> dict:
    write_model(folder, family, vocab_size=VOCABULARY)
    sizes = {"tensor": tensor, "expert_model_parallel_size": tensor, "expert_tensor_parallel_size": 1}
    sizes["sequence_parallel"] = tensor > 1  # which Megatron asks for beside experts on several ranks
    local, engine = (model_of(folder, in_engine, **sizes).module for in_engine in (False, True))
    returned = dict(stream_hf_tensors(engine, VOCABULARY))
    original = load_file(folder / "model.safetensors")
    if torch.distributed.get_rank() == 0:
        assert returned.keys() == original.keys()
    layer = engine.decoder.layers[0]
    classes = [layer.self_attention.linear_qkv, layer.self_attention.linear_proj, engine.decoder.final_layernorm]
    classes.append(layer.mlp.experts.linear_fc1 if family in EXPERTS else layer.mlp.linear_fc1)
    keys = [{shard.key for shard in model.sharded_state_dict().values()} for model in (local, engine)]
    return {
        "engine": [module_of(of) for of in classes],
        "tensors": len(original),
        "changed": [name for name in returned if not torch.equal(returned[name], original[name])],
        "keys": sorted(key for key in keys[0] ^ keys[1] if "_extra_state" not in key),
        "shapes": sorted(
            name
            for name, own in engine.named_parameters()
            if name in (there := dict(local.named_parameters())) and there[name].shape != own.shape
        ),
    }


def module_of(layer: torch.nn.Module) -> str:
    """The class of Transformer Engine's that a layer of Megatron's is."""
    return next(c.__name__ for c in type(layer).__mro__ if c.__module__.startswith("transformer_engine."))
