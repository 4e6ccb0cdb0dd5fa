"""The policy head on a device: distances to float64, its kernels beside plain torch, time, memory, host syncs."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from gpu_device import Device, head_answers
from policy_head_methods import ON_A_GPU, gated, naive, single_pass
from policy_head_problem import Problem

from nemo_flashrl.ops import fused_linear_logprob, kernels
from nemo_flashrl.ops.head import picked_chunk_tokens
from nemo_flashrl.ops.memory import policy_head_memory
from nemo_flashrl.ops.softmax import ChunkStatistics

HALF = 0.5  # of the tokens are live behind a gate, where it matters


def main(part: str, **options) -> dict:
    tokens = options.get("tokens", 0)
    with Device(head_answers(tokens // 2)) as device:
        return PARTS[part](device, **options)


def problem_of(device: Device, tokens: int, hidden: int, vocab: int, chunk: int, dtype=torch.bfloat16) -> Problem:
    sizes = {"device": device.name, "dtype": dtype, "spread": hidden**-0.5, "generator": device.generator()}
    return Problem(tokens, hidden, vocab, chunk, **sizes)


def exactness(device: Device, way: str, dtype: str, **sizes: int) -> dict:
    """Relative distance to float64 of log-probs and both gradients, of the naive way's and of ours."""
    problem = problem_of(device, **sizes, dtype=getattr(torch, dtype))
    masked = problem.as_dtype(problem.hidden.dtype)
    if way == "gated":
        masked.advantages = torch.where(problem.live(HALF), problem.advantages, 0)
    ours = gated(problem, HALF) if way == "gated" else single_pass(problem)
    truth = _numbers(masked.as_dtype(torch.float64), naive, _plain_logprobs)
    plain = _numbers(masked, naive, _plain_logprobs)
    found = _numbers(problem, lambda _: ours, _own_logprobs)
    names = ("logprobs", "hidden", "weight")
    return {
        "naive": dict(zip(names, map(_apart, plain, truth), strict=True)),
        "ours": dict(zip(names, map(_apart, found, truth), strict=True)),
    }


def _numbers(problem: Problem, way: Callable, logprobs: Callable) -> list[torch.Tensor]:
    problem.clear()
    way(problem)()
    with torch.no_grad():
        return [logprobs(problem), problem.hidden.grad, problem.weight.grad]


def _plain_logprobs(problem: Problem) -> torch.Tensor:
    logits = problem.hidden @ problem.weight.t()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.log_softmax(logits, -1).gather(1, problem.targets[:, None]).squeeze(1)


def _own_logprobs(problem: Problem) -> torch.Tensor:
    return fused_linear_logprob(problem.hidden, problem.weight, problem.targets, chunk_tokens=problem.chunk)


def _apart(values: torch.Tensor, truth: torch.Tensor) -> float:
    distance, size = (values.double() - truth).norm(), truth.norm()
    return float(distance / size)


def kernels_beside_torch(device: Device, rows: int, columns: int, entropy: bool) -> dict:
    """Largest difference of the statistics, and the distance of the gradients relative to their norm, by dtype."""
    if not kernels.HAS_TRITON:
        return {"skipped": "Triton is not installed"}
    drawn = {"generator": device.generator(), "device": "cuda"}
    logits = 5 * torch.randn(rows, columns, **drawn)
    targets = torch.randint(2 * columns, (rows,), **drawn)
    derivative, slope = torch.randn(2, rows, **drawn)
    scale = 0.5 + torch.rand(rows, **drawn)
    found = {}

    def numbers(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        packed = kernels.row_statistics(logits, targets, columns // 2, scale, entropy=True)
        shift, exp_sum, target, weighted = packed
        logprobs, entropies = target - shift - exp_sum.log(), exp_sum.log() - weighted / exp_sum
        known = ChunkStatistics(logprobs.clamp(max=0), shift, exp_sum, shift, entropies)
        own = slope if entropy else None
        return packed, kernels.logit_gradient_(
            logits.clone(), dtype, targets, columns // 2, scale, known, derivative, own
        )

    is_fused = kernels.is_fused
    for dtype in (torch.float32, torch.bfloat16):
        packed, gradient = numbers(dtype)
        kernels.is_fused = lambda _: False
        plain_packed, plain_gradient = numbers(dtype)
        kernels.is_fused = is_fused
        beyond = (packed - plain_packed).abs() - 1e-5 * (1 + plain_packed.abs())
        found[str(dtype)] = {
            "statistics_beyond_1e-5": float(beyond.max()),
            "gradient": float((gradient - plain_gradient).float().norm() / plain_gradient.float().norm()),
        }
    return found


def speed(device: Device, tokens: int, hidden: int, vocab: int, rounds: int) -> dict:
    """Milliseconds and bytes of each way; `planned` is what ours may take."""
    chunk = picked_chunk_tokens(vocab)
    problem = problem_of(device, tokens, hidden, vocab, chunk)
    found: dict = {"chunk": chunk, "planned": {}}
    for name, way in ON_A_GPU.items():
        try:
            run = way(problem)
        except ImportError as reason:
            found[name] = {"skipped": str(reason)}
            continue
        problem.clear()
        device.warm_up(run)
        problem.clear()
        held = device.held
        found[name] = {"peak_bytes": device.peak_of(run) - held}

        def once(run: Callable[[], None] = run) -> None:
            problem.clear()
            run()

        found[name]["ms"] = device.milliseconds(once, rounds)
        problem.clear()
        del run, once
        gc.collect()
    block = 0 if kernels.wgrad_gemm_accum_fp32 else 2**25  # of the weight's gradient, beside its sum
    for name, budget in (("one pass", 0), ("gated", 64 * 2**20)):
        sizes = {"chunk_tokens": chunk, "sequence_parallel": False, "logits_budget_bytes": budget}
        found["planned"][name] = policy_head_memory(tokens, hidden, vocab, **sizes).peak + block
    return found


def peak(device: Device, **sizes: int) -> dict:
    """Bytes of one pass whose weight gradient is autograd's: staged in fp32, then handed over."""
    problem = problem_of(device, **sizes)
    run = single_pass(problem)
    device.warm_up(run)
    problem.clear()
    held = device.held
    return {"peak_bytes": device.peak_of(run) - held}


def waits(device: Device, way: str, **sizes: int) -> dict:
    """Host syncs of a call with a mask."""
    problem = problem_of(device, **sizes)
    mask = torch.ones(sizes["tokens"], dtype=torch.bool, device="cuda")
    run = gated(problem, HALF, mask=mask) if way == "gated" else single_pass(problem, mask=mask)
    device.warm_up(run)
    return {"syncs": device.waits_of(run)}


PARTS = {"exactness": exactness, "kernels": kernels_beside_torch, "speed": speed, "peak": peak, "waits": waits}
