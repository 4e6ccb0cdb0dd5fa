"""Folder -> shards -> Hugging Face names at one TP x PP, and Megatron's logits, for several folders.

Megatron's groups are made once: each one keeps threads of gloo until its process ends, whoever drops it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from allocations import allocator_peak
from safetensors.torch import load_file

from nemo_flashrl import platform


@dataclass(frozen=True)
class Sizes:
    """Parallel sizes; `expert_tensor` 0 is the dense layers'."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 0
    chunks: int = 1  # of the virtual pipeline, on every stage

    def __str__(self) -> str:
        return f"tp{self.tensor} pp{self.pipeline} ep{self.expert} etp{self.expert_tensor} vp{self.chunks}"


def main(out: Path, sizes: Sizes, *folders: Path) -> None:
    from megatron.core import parallel_state

    torch.distributed.init_process_group(platform.backend())
    parallel_state.initialize_model_parallel(
        sizes.tensor,
        sizes.pipeline,
        sizes.chunks if sizes.chunks > 1 else None,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=sizes.expert_tensor or sizes.tensor,
    )
    platform.seed_model_parallel(0)
    report = {f"{folder.name} {sizes}": check(folder, sizes) for folder in folders}
    if torch.distributed.get_rank() == 0:
        out.write_text(json.dumps(report))


def check(folder: Path, sizes: Sizes) -> dict[str, float | bool]:
    """Whether tensors return bit-equal (rank 0), and the largest difference of logits (pipeline of one stage)."""
    from nemo_flashrl.models.families import nemo_config, read_hf_config
    from nemo_flashrl.weights.hf_folder import load_hf_folder
    from nemo_flashrl.weights.shards import stream_hf_tensors

    source = read_hf_config(folder)
    config = nemo_config(folder, context_length=128, tensor_parallel=sizes.tensor, pipeline_parallel=sizes.pipeline)
    config.tensor_model_parallel_size, config.pipeline_model_parallel_size = sizes.tensor, sizes.pipeline
    config.expert_model_parallel_size = sizes.expert
    config.expert_tensor_parallel_size = sizes.expert_tensor or sizes.tensor
    config.virtual_pipeline_model_parallel_size = sizes.chunks if sizes.chunks > 1 else None
    config.pipeline_dtype = torch.float32
    chunks = [config.configure_model(tokenizer=None, vp_stage=stage).eval() for stage in range(sizes.chunks)]
    model = chunks if sizes.chunks > 1 else chunks[0]
    load_hf_folder(model, folder, source["vocab_size"])
    original = load_file(folder / "model.safetensors")
    streamed = {name: t.clone() for name, t in stream_hf_tensors(model, source["vocab_size"])}
    result: dict[str, float | bool] = {}
    if torch.distributed.get_rank() == 0:
        result["names_equal"] = streamed.keys() == original.keys()
        result["bit_equal"] = all(torch.equal(streamed[name], original[name]) for name in original)
    if sizes == Sizes(2, 2):
        drain = lambda: list(map(len, stream_hf_tensors(model, source["vocab_size"])))  # noqa: E731
        # The best of a few: a thread of the backend lets go of its own buffers when its turn comes.
        peak = torch.tensor(min(allocator_peak(drain) for _ in range(20)))
        torch.distributed.all_reduce(peak, op=torch.distributed.ReduceOp.MAX)
        held = torch.tensor(max(p.numel() * 4 * (2 if p.ndim == 2 else 1) for p in model.parameters()))
        torch.distributed.all_reduce(held, op=torch.distributed.ReduceOp.MAX)
        result["largest"], result["peak"] = int(held), int(peak)
    if sizes.pipeline == 1:
        result["logits_difference"] = logits_difference(model, folder, source["vocab_size"], sizes.tensor)
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
    if torch.distributed.get_rank() != 0:
        return 0.0
    expected = AutoModelForCausalLM.from_pretrained(folder).eval()(tokens).logits
    return float((torch.cat(shards, -1)[..., :vocab_size] - expected).abs().max() / expected.abs().max())
