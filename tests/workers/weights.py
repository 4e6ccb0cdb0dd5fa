"""Folder -> shards -> Hugging Face names at several TP x PP, and Megatron's logits, all in one set of processes."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from nemo_flashrl import platform


def main(out: Path, *folders: Path) -> None:
    torch.distributed.init_process_group(platform.backend())
    report = {}
    for folder in folders:
        for tensor, pipeline in ((1, 1), (2, 1), (1, 2), (2, 2)):
            report[f"{folder.name} tp{tensor} pp{pipeline}"] = check(folder, tensor, pipeline)
    if torch.distributed.get_rank() == 0:
        out.write_text(json.dumps(report))


def check(folder: Path, tensor: int, pipeline: int) -> dict[str, float | bool]:
    """Largest difference of tensors (rank 0) and of logits (pipeline of one stage)."""
    from megatron.core import parallel_state

    from nemo_flashrl.models.families import nemo_config, read_hf_config
    from nemo_flashrl.weights.hf_folder import load_hf_folder
    from nemo_flashrl.weights.shards import stream_hf_tensors

    parallel_state.initialize_model_parallel(tensor, pipeline)
    platform.seed_model_parallel(0)
    source = read_hf_config(folder)
    config = nemo_config(folder, context_length=128, tensor_parallel=tensor, pipeline_parallel=pipeline)
    config.tensor_model_parallel_size, config.pipeline_model_parallel_size = tensor, pipeline
    config.pipeline_dtype = torch.float32
    model = config.configure_model(tokenizer=None).eval()
    load_hf_folder(model, folder, source["vocab_size"])
    original = load_file(folder / "model.safetensors")
    streamed = {name: t.clone() for name, t in stream_hf_tensors(model, source["vocab_size"])}
    result: dict[str, float | bool] = {}
    if torch.distributed.get_rank() == 0:
        result["names_equal"] = streamed.keys() == original.keys()
        result["bit_equal"] = all(torch.equal(streamed[name], original[name]) for name in original)
    if pipeline == 1:
        result["logits_difference"] = logits_difference(model, folder, source["vocab_size"], tensor)
    parallel_state.destroy_model_parallel()
    return result


@torch.no_grad()
def logits_difference(model, folder: Path, vocab_size: int, tensor: int) -> float:
    from megatron.core import parallel_state
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(0, vocab_size, (2, 40), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(40).repeat(2, 1)
    local = model(tokens, positions, None)
    shards = [torch.empty_like(local) for _ in range(tensor)]
    torch.distributed.all_gather(shards, local, group=parallel_state.get_tensor_model_parallel_group())
    expected = AutoModelForCausalLM.from_pretrained(folder).eval()(tokens).logits
    return float((torch.cat(shards, -1)[..., :vocab_size] - expected).abs().max() / expected.abs().max())
