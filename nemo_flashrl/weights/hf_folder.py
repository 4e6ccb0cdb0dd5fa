"""A Hugging Face checkpoint folder -> this rank's shard, and live shards -> such a folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel as MegatronGPTModel
from safetensors.torch import save_file
from torch import Tensor

from nemo_flashrl.weights.hf_tensors import HfTensors
from nemo_flashrl.weights.mapping import Layout, Place, find_rule
from nemo_flashrl.weights.shards import local_parameters

MAX_SHARD_BYTES = 5 * 2**30  # transformers' own default


@torch.no_grad()
def load_hf_folder(model: MegatronGPTModel, folder: str | Path, vocab_size: int) -> None:
    """Fill this rank's shard from a folder, in place; ValueError names a tensor that is missing or misshapen."""
    source = HfTensors(folder)
    layout = Layout.of(model.config, vocab_size)
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    for name, layer, parameter in local_parameters(model):
        rule = find_rule(name)
        names = rule.hf_names(name, layer)
        if name == "output_layer.weight" and layout.tied:
            names = ["model.embed_tokens.weight"]
        shard = rule.from_hf([source[n] for n in names], layout, Place(rank, size, parameter.shape))
        if shard.shape != parameter.shape:
            given, own = tuple(shard.shape), tuple(parameter.shape)
            raise ValueError(f"{', '.join(names)} of {folder} give {given} for {name}, which is {own}")
        parameter.copy_(shard)


def write_hf_folder(stream: Iterable[tuple[str, Tensor]], source: str | Path, target: str | Path) -> None:
    """Write tensors as a Hugging Face checkpoint beside the configuration and tokenizer files of `source`.

    The folder appears whole or not at all: it is written under another name and renamed. An existing one is refused.
    """
    target = Path(target)
    if target.exists():
        raise ValueError(f"{target} exists: an export never overwrites; choose another folder or remove it")
    staging = target.with_name(f".{target.name}.{os.getpid()}")
    staging.mkdir(parents=True)
    try:
        _write_tensors(stream, staging)
        for file in Path(source).iterdir():
            if file.is_file() and file.suffix not in {".safetensors", ".bin"} and "safetensors" not in file.name:
                shutil.copy2(file, staging / file.name)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write_tensors(stream: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    weight_map: dict[str, int] = {}
    part: dict[str, Tensor] = {}
    part_bytes = total_bytes = part_number = 0
    for name, tensor in stream:
        size = tensor.numel() * tensor.element_size()
        if part and part_bytes + size > MAX_SHARD_BYTES:
            save_file(part, folder / f"part-{part_number}", metadata={"format": "pt"})
            part, part_bytes, part_number = {}, 0, part_number + 1
        part[name] = tensor.to("cpu", copy=True).contiguous()
        weight_map[name] = part_number
        part_bytes += size
        total_bytes += size
    save_file(part, folder / f"part-{part_number}", metadata={"format": "pt"})
    if part_number == 0:
        (folder / "part-0").rename(folder / "model.safetensors")
        return
    names = [f"model-{n + 1:05d}-of-{part_number + 1:05d}.safetensors" for n in range(part_number + 1)]
    for number, file_name in enumerate(names):
        (folder / f"part-{number}").rename(folder / file_name)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": {k: names[n] for k, n in weight_map.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
