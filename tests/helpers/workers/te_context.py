"""A packed row over two context ranks in Transformer Engine's layers, against transformers in float64."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import transformers
from megatron.core import parallel_state
from plain import worst_error
from tiny import write_model
from transformer_engine.pytorch import attention

from nemo_flashrl.data.context_parallel import context_share
from nemo_flashrl.weights.shards import stream_hf_tensors
from workers.te_families import VOCABULARY, model_of

LENGTHS = (12, 8, 20)  # each makes four equal chunks
FAMILIES = ("qwen2", "qwen3")


def main() -> dict:
    """Errors of log-probs (largest) and gradients (relative norm, and of which tensor), of each family."""
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, 1, context_parallel_size=2)
    with tempfile.TemporaryDirectory() as models:
        return {family: compared(write_model(Path(models) / family, family)) for family in FAMILIES}


def compared(folder: Path) -> dict:
    ids = torch.randint(0, VOCABULARY, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    weights = torch.randn(ids.shape, generator=torch.Generator().manual_seed(2))
    row = {
        "tokens": ids,
        "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None],
        "targets": torch.cat([part.roll(-1, 1) for part in ids.split(LENGTHS, 1)], 1),
        "weights": weights,
    }
    logprobs, gradients = plain(folder, row)
    row |= {"place": torch.arange(sum(LENGTHS))[None], "max_seqlen": torch.tensor(max(LENGTHS))}
    row["cu_seqlens"] = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    found = {"right": of_ranks(folder, row, logprobs, gradients)}
    order, attention._positions = attention._positions, in_order_of_ranks
    found["in the order of ranks"] = of_ranks(folder, row, logprobs, gradients)
    attention._positions = order
    return found


def in_order_of_ranks(length: int, size: int) -> torch.Tensor:
    """Wrong: as if each rank held one chunk, and keys need not be put in order when they have been gathered."""
    return torch.arange(length).view(size, -1)


def of_ranks(folder: Path, row: dict, logprobs: torch.Tensor, gradients: dict) -> dict:
    """This rank's share of the row through the model; log-probs where they are held, gradients summed over ranks."""
    model = model_of(folder, in_engine=True, context_parallel_size=2)
    share = context_share(row, parallel_state.get_context_parallel_rank(), 2)
    held = model.score_step(share)
    (held * share["weights"]).sum().backward()
    for parameter in model.module.parameters():
        torch.distributed.all_reduce(parameter.grad)
    apart = (held.detach().double() - logprobs.gather(1, share["place"])).abs().max()
    torch.distributed.all_reduce(apart, op=torch.distributed.ReduceOp.MAX)
    summed = {name: g.clone() for name, g in stream_hf_tensors(model.module, VOCABULARY, lambda p: p.grad)}
    is_first = parallel_state.get_context_parallel_rank() == 0
    return {"logprobs": float(apart), "gradients": worst_error(summed, gradients) if is_first else None}


def plain(folder: Path, row: dict) -> tuple[torch.Tensor, dict]:
    """Log-probs [1, T] and the gradients of their weighted sum, each sequence by itself."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    parts = [torch.log_softmax(model(part).logits, -1) for part in row["tokens"].split(LENGTHS, 1)]
    logprobs = torch.cat(parts, 1).gather(-1, row["targets"][..., None])[..., 0]
    (logprobs * row["weights"]).sum().backward()
    return logprobs.detach(), {name: p.grad for name, p in model.named_parameters()}
