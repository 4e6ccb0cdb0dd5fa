"""A Hugging Face folder at one TP x PP: its tensors back under their names, and Megatron's logits in fp32 and bf16."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core import parallel_state
from safetensors.torch import load_file

from nemo_flashrl import platform
from nemo_flashrl.models.families import nemo_config, read_hf_config
from nemo_flashrl.weights.hf_folder import load_hf_folder
from nemo_flashrl.weights.shards import stream_hf_tensors


def main(out: Path, folder: Path, tokens: list[int], tensor: int, pipeline: int) -> None:
    """`out` gets logits [S, V] by dtype, from the last stage; rank 0 asserts that the tensors return bit for bit."""
    torch.distributed.init_process_group(platform.backend())
    parallel_state.initialize_model_parallel(tensor, pipeline)
    platform.seed_model_parallel(0)
    vocab_size = read_hf_config(folder)["vocab_size"]
    answers = {}
    for dtype in (torch.float32, torch.bfloat16):
        sizes = {"tensor_parallel": tensor, "pipeline_parallel": pipeline}
        config = nemo_config(folder, context_length=256, dtype=dtype, **sizes)
        config.tensor_model_parallel_size, config.pipeline_model_parallel_size = tensor, pipeline
        config.pipeline_dtype = dtype
        model = config.configure_model(tokenizer=None).to(dtype).eval()
        load_hf_folder(model, folder, vocab_size)
        if dtype == torch.float32:
            check_tensors(stream_hf_tensors(model, vocab_size), folder)
        answers[str(dtype)] = logits(model, tokens, vocab_size)
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        torch.save(answers, out)


def check_tensors(stream, folder: Path) -> None:
    original = load_file(folder / "model.safetensors") if torch.distributed.get_rank() == 0 else None
    for name, tensor in stream:
        if original is not None:
            assert torch.equal(original.pop(name), tensor), name
    assert not original


@torch.no_grad()
def logits(model, tokens: list[int], vocab_size: int) -> torch.Tensor | None:
    """[S, V] on the last stage; the hidden states between two stages go by hand."""
    ids, positions = torch.tensor([tokens]), torch.arange(len(tokens))[None]
    rank, step = torch.distributed.get_rank(), parallel_state.get_tensor_model_parallel_world_size()
    if not parallel_state.is_pipeline_first_stage():
        hidden = torch.empty(len(tokens), 1, model.config.hidden_size, dtype=model.config.params_dtype)
        torch.distributed.recv(hidden, rank - step)
        model.set_input_tensor(hidden)
    output = model(ids, positions, None)
    if not parallel_state.is_pipeline_last_stage():
        torch.distributed.send(output, rank + step)
        return None
    shards = [torch.empty_like(output) for _ in range(step)]
    torch.distributed.all_gather(shards, output, group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(shards, -1)[0, :, :vocab_size]
