"""The policy head alone on one fake GPU of a tensor-parallel group: launches, waits, bytes and memory at true sizes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from accelerator import check_out_dtype
from fake_cuda import make_world, seem_to_have_cuda
from gpu_recorder import Answer, Recorder, two_clocks, walk

from nemo_flashrl.ops import (
    fused_linear_gated_policy_loss,
    fused_linear_logprob,
    fused_linear_policy_loss,
    head,
    kernels,
    tensor_parallel,
)
from nemo_flashrl.ops.memory import policy_head_memory

BUDGET = 64 * 2**20


def main(
    way: str,  # "logprob" | "one pass" | "gated"
    tokens: int,
    hidden: int,
    vocab: int,
    tensor: int,
    chunk: int | None = None,
    live: float = 1.0,  # share of the tokens in the mask
    spread: float = 0.0,  # by which the fullest shard has more of them than the mean, and the emptiest fewer
    triton: bool = True,
    apex: bool = True,
    torch_version: str = "2.8",
    per_token_temperature: bool = False,
) -> dict:
    seem_to_have_cuda()
    make_world(tensor)
    kernels.HAS_TRITON, kernels.wgrad_gemm_accum_fp32 = triton, _accumulate if apex else None
    chunk = chunk or head.picked_chunk_tokens(vocab // tensor)

    def check(name: str, arguments: tuple, options: dict) -> None:
        if name in ("mm.dtype", "mm.dtype_out", "addmm.dtype", "addmm.dtype_out"):
            matrices = [value for value in arguments if isinstance(value, torch.Tensor)]
            (out_dtype,) = (value for value in (*arguments, *options.values()) if isinstance(value, torch.dtype))
            if not _accumulating:
                out = options.get("out")
                check_out_dtype(torch_version, tuple(matrices), out_dtype, None if out is None else out.dtype)

    recorder = Recorder(_answers(tokens // tensor, chunk // tensor, live, spread, way), check)
    under_way = _watch_exchanges(recorder)
    with recorder:
        device = torch.device("cuda", 0)
        states = torch.empty(tokens // tensor, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(vocab // tensor, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
        grad_weight = torch.empty(vocab // tensor, hidden, device=device, dtype=torch.float32)
        targets = torch.empty(tokens, device=device, dtype=torch.int64)
        coefficient = torch.empty(tokens, device=device)
        mask = torch.empty(tokens, device=device, dtype=torch.bool)
        temperature = torch.empty(tokens, device=device) if per_token_temperature else 0.9
        options = {
            "tp_group": torch.distributed.group.WORLD if tensor > 1 else None,
            "sequence_parallel": tensor > 1,
            "vocab_size": vocab,
            "temperature": temperature,
            "chunk_tokens": chunk,
            "mask": mask,
            "grad_weight": grad_weight,
            "on_grad_weight": lambda: None,
        }
        before = recorder.current
        recorder.restart()
        _loss(way, states, weight, targets, coefficient, options).backward()
        logits, walks = tokens * live * vocab / tensor, 1 if way == "one pass" else 2
        product_ms = 2 * logits * hidden / 700e9
        clocks = two_clocks(recorder.events)
        plain = [event for event in recorder.events if event.name != "sync" and not event.flops]
        return {
            "launches": recorder.launches,
            "syncs": list(walk(recorder)),
            "late_copies": recorder.late_copies.total(),
            "num_syncs": recorder.syncs.total(),
            "peak": recorder.peak - before,
            "planned": policy_head_memory(
                tokens,
                hidden,
                vocab,
                tensor_parallel=tensor,
                chunk_tokens=chunk,
                sequence_parallel=tensor > 1,
                logits_budget_bytes=BUDGET if way == "gated" else 0,
            ).peak,
            "chunk": chunk,
            "under_products": {name: [sum(waits), len(waits)] for name, waits in under_way.items()},
            "ms": clocks["wall"],
            # Behind a gate the chunk that is held needs no second product of its logits.
            "floor_ms": clocks["floor"] if way == "gated" else (walks + 2) * product_ms,
            "bytes_of_walk": sum(event.bytes for event in plain) / logits / walks,
        }


def _watch_exchanges(recorder: Recorder) -> dict[str, list[bool]]:
    """Of each exchange that is waited for later: whether a product was launched meanwhile."""
    under_way: dict[str, list[bool]] = {}

    def watched(exchange: Callable, name: str = "") -> Callable:
        def begin(out: torch.Tensor, *arguments: Any, **options: Any) -> SimpleNamespace:
            work, begun = exchange(out, *arguments, **options), len(recorder.events)
            waits = under_way.setdefault(name or ("statistics" if out.dtype == torch.float32 else "hidden states"), [])

            def wait() -> None:
                waits.append(any(event.flops for event in recorder.events[begun:]))
                work.wait()

            return SimpleNamespace(wait=wait)

        return begin

    tensor_parallel._all_gather = watched(tensor_parallel._all_gather)
    tensor_parallel._reduce_scatter = watched(tensor_parallel._reduce_scatter, "hidden gradients")
    return under_way


_accumulating = []


def _accumulate(rows: torch.Tensor, gradient: torch.Tensor, out: torch.Tensor) -> None:
    """apex's kernel: the sum in one launch."""
    _accumulating.append(True)
    torch.addmm(out, gradient.t(), rows, out_dtype=torch.float32, out=out)
    _accumulating.pop()


def _answers(columns: int, width: int, live: float, spread: float, way: str) -> list[Answer]:
    """Of what the host reads: the mask, and behind a gate the tokens whose chunk is not held."""
    fullest, emptiest = (round(columns * live * (1 + sign * spread)) for sign in (1, -1))
    looks = []  # at a mask

    def is_all(_: object) -> bool:
        looks.append(1)
        return live == 1 and (len(looks) == 1 or way == "logprob")

    def left(count: int) -> int:
        if way != "gated" or len(looks) == 1:
            return count
        held = fullest % width or width  # columns of the last chunk
        return max(0, count - held) if count == fullest else min(count, fullest - held)

    return [
        Answer("ops/head.py", "seen[", False),
        Answer("ops/chunks.py", "selected.all()", is_all),
        Answer("ops/chunks.py", "counts.min()", lambda _: left(emptiest)),
        Answer("ops/chunks.py", "counts.max()", lambda _: left(fullest)),
        Answer("ops/", "grad_output", 1.0),
    ]


def _loss(way: str, states, weight, targets, coefficient, options) -> torch.Tensor:
    if way == "logprob":
        return (coefficient * fused_linear_logprob(states, weight, targets, **options)).sum()
    if way == "one pass":

        def token_loss(logprobs: torch.Tensor, at: slice) -> tuple[torch.Tensor, torch.Tensor]:
            derivative = -coefficient[at] * torch.exp(logprobs - coefficient[at])
            return derivative, derivative

        return fused_linear_policy_loss(states, weight, targets, token_loss, **options)[0]
    keep = torch.empty_like(options["mask"])

    def gated_loss(logprobs: torch.Tensor, kept: torch.Tensor, at: slice) -> tuple[torch.Tensor, torch.Tensor]:
        derivative = torch.where(kept[at], -coefficient[at] * torch.exp(logprobs - coefficient[at]), 0)
        return derivative, derivative

    options = options | {"logits_budget_bytes": BUDGET}
    return fused_linear_gated_policy_loss(states, weight, targets, lambda *_: keep, gated_loss, **options)[0]
