"""Time and memory of one policy-gradient loss over an output layer, forward and backward, beside other definitions of it.

    OMP_NUM_THREADS=1 python benchmarks/policy_head.py                # every table below; about 15 minutes
    python benchmarks/policy_head.py --table small --rounds 5         # one table
    python benchmarks/policy_head.py --paper                          # peak per rank of a large job, from the formula

One thread. Times are ratios to the floor: three bare matrix products of that size into preallocated matrices, full size. In
a round every method runs once, floor first; the ratio is taken within the round and the median over rounds is shown.

Memory is exact at the allocator: torch's profiler reports each allocation and release, and the peak of their running sum is
what a call took beyond hidden, weight and targets, gradients included. A process of its own per case also reports
by how much its resident set peaked, which sees what BLAS takes for itself.

Peers: `naive` is autograd over full logits; `checkpoint` the same per chunk of tokens under torch.utils.checkpoint; `liger` is
LigerFusedLinearGRPOLoss of the PyPI package liger-kernel, its plain torch path, chunks of equal size; `trl` is TRL's
`selective_log_softmax` over full logits and `vocabulary` the log-sum-exp over blocks of the vocabulary with recomputation,
both written out below in plain torch.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nemo_flashrl.ops import fused_linear_gated_policy_loss, fused_linear_logprob, fused_linear_policy_loss  # noqa: E402
from nemo_flashrl.ops.memory import policy_head_memory  # noqa: E402

MIB = 2**20
GIB = 2**30


class Problem:
    """Inputs of one size: hidden `[T, H]`, weight `[V, H]`, targets `[T]`, and a REINFORCE loss with token ratios."""

    def __init__(self, tokens: int, hidden_size: int, vocab_size: int, chunk: int):
        generator = torch.Generator().manual_seed(0)
        self.chunk = chunk
        self.hidden = torch.randn(tokens, hidden_size, generator=generator).requires_grad_()
        self.weight = (torch.randn(vocab_size, hidden_size, generator=generator) * 0.05).requires_grad_()
        self.targets = torch.randint(vocab_size, (tokens,), generator=generator)
        self.advantages = torch.randn(tokens, generator=generator)
        with torch.no_grad():
            self.behavior = fused_linear_logprob(self.hidden, self.weight, self.targets, chunk_tokens=chunk)
            self.behavior += 0.05 * torch.randn(tokens, generator=generator)

    def clear(self) -> None:
        self.hidden.grad = self.weight.grad = None

    def loss(self, logprobs: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        coefficient = -self.advantages[tokens] * torch.exp(logprobs - self.behavior[tokens])
        return coefficient * logprobs, coefficient

    def plain_loss(self, logprobs: Tensor) -> Tensor:
        ratio = torch.exp(logprobs.detach() - self.behavior)
        return -(self.advantages * ratio * logprobs).sum()


def floor(problem: Problem) -> Callable[[], None]:
    hidden, weight = problem.hidden.detach(), problem.weight.detach()
    logits = torch.empty(hidden.shape[0], weight.shape[0])
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def run() -> None:
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits, weight, out=grad_hidden)
        torch.mm(logits.t(), hidden, out=grad_weight)

    return run


def product(problem: Problem) -> Callable[[], None]:
    """The log-prob product alone, as the floor has it."""
    hidden, weight = problem.hidden.detach(), problem.weight.detach()
    logits = torch.empty(hidden.shape[0], weight.shape[0])
    return lambda: torch.mm(hidden, weight.t(), out=logits)


def chunked_floor(problem: Problem) -> Callable[[], None]:
    """The same three products a chunk at a time: what a chunked method could reach at best."""
    hidden, weight = problem.hidden.detach(), problem.weight.detach()
    logits = torch.empty(problem.chunk, weight.shape[0])
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)

    def run() -> None:
        for start in range(0, hidden.shape[0], problem.chunk):
            rows = hidden[start : start + problem.chunk]
            part = logits[: rows.shape[0]]
            torch.mm(rows, weight.t(), out=part)
            torch.mm(part, weight, out=grad_hidden[start : start + problem.chunk])
            grad_weight.addmm_(part.t(), rows)

    return run


def single_pass(problem: Problem) -> Callable[[], None]:
    def run() -> None:
        loss, _ = fused_linear_policy_loss(
            problem.hidden, problem.weight, problem.targets, problem.loss, chunk_tokens=problem.chunk
        )
        loss.backward()

    return run


def gated(problem: Problem, live: float, **settings: int) -> Callable[[], None]:
    keep = torch.rand(problem.targets.shape, generator=torch.Generator().manual_seed(1)) < live

    def loss(logprobs: Tensor, keep: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        value, derivative = problem.loss(logprobs, tokens)
        return torch.where(keep[tokens], value, 0), torch.where(keep[tokens], derivative, 0)

    def run() -> None:
        total, _ = fused_linear_gated_policy_loss(
            problem.hidden,
            problem.weight,
            problem.targets,
            lambda logprobs, entropies: keep,
            loss,
            chunk_tokens=problem.chunk,
            **settings,
        )
        total.backward()

    return run


def naive(problem: Problem) -> Callable[[], None]:
    def run() -> None:
        logprobs = torch.log_softmax(problem.hidden @ problem.weight.t(), -1)
        problem.plain_loss(logprobs.gather(1, problem.targets[:, None]).squeeze(1)).backward()

    return run


def checkpointed(problem: Problem) -> Callable[[], None]:
    def part(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return torch.log_softmax(hidden @ weight.t(), -1).gather(1, targets[:, None]).squeeze(1)

    def run() -> None:
        parts = [
            checkpoint(part, hidden, problem.weight, targets, use_reentrant=False)
            for hidden, targets in zip(
                problem.hidden.split(problem.chunk), problem.targets.split(problem.chunk), strict=True
            )
        ]
        problem.plain_loss(torch.cat(parts)).backward()

    return run


def liger(problem: Problem) -> Callable[[], None]:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    rows = problem.targets.shape[0] // problem.chunk
    loss = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False, chunk_size=1)
    mask = torch.ones(rows, problem.chunk)

    def run() -> None:
        total, _ = loss(
            problem.hidden.view(rows, problem.chunk, -1),
            problem.weight,
            problem.targets.view(rows, -1),
            mask,
            problem.advantages[:rows],
            old_per_token_logps=problem.behavior.view(rows, -1),
        )
        total.backward()

    return run


def trl(problem: Problem) -> Callable[[], None]:
    def run() -> None:
        logits = problem.hidden @ problem.weight.t()
        selected = logits.gather(-1, problem.targets[:, None]).squeeze(-1)
        log_sums = torch.stack([torch.logsumexp(part, -1) for part in logits.view(-1, problem.chunk, logits.shape[-1])])
        problem.plain_loss(selected - log_sums.view(-1)).backward()

    return run


class _VocabularyBlocks(torch.autograd.Function):
    """Log-probs with a running log-sum-exp over blocks of the vocabulary; backward recomputes each block."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, block):
        maximum = torch.full((hidden.shape[0],), float("-inf"))
        total, selected = torch.zeros_like(maximum), torch.zeros_like(maximum)
        for start in range(0, weight.shape[0], block):
            logits = hidden @ weight[start : start + block].t()
            larger = torch.maximum(maximum, logits.amax(-1))
            total = total * torch.exp(maximum - larger) + torch.exp(logits - larger[:, None]).sum(-1)
            maximum = larger
            inside = (targets >= start) & (targets < start + logits.shape[1])
            column = (targets - start).clamp(0, logits.shape[1] - 1)
            selected = torch.where(inside, logits.gather(1, column[:, None]).squeeze(1), selected)
        log_sum = maximum + total.log()
        ctx.save_for_backward(hidden, weight, targets, log_sum)
        ctx.block = block
        return selected - log_sum

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, targets, log_sum = ctx.saved_tensors
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for start in range(0, weight.shape[0], ctx.block):
            part = weight[start : start + ctx.block]
            gradient = torch.exp(hidden @ part.t() - log_sum[:, None]) * -grad[:, None]
            rows = ((targets >= start) & (targets < start + part.shape[0])).nonzero().squeeze(1)
            gradient[rows, targets[rows] - start] += grad[rows]
            grad_hidden += gradient @ part
            grad_weight[start : start + ctx.block] = gradient.t() @ hidden
        return grad_hidden, grad_weight, None, None


def vocabulary(problem: Problem) -> Callable[[], None]:
    block = max(
        1, problem.chunk * problem.weight.shape[0] // problem.hidden.shape[0]
    )  # as many logits as our chunk holds
    return lambda: problem.plain_loss(
        _VocabularyBlocks.apply(problem.hidden, problem.weight, problem.targets, block)
    ).backward()


METHODS: dict[str, Callable[[Problem], Callable[[], None]]] = {
    "floor": floor,
    "product": product,
    "chunked floor": chunked_floor,
    "ours": single_pass,
    "gated, all live": lambda problem: gated(problem, 2.0),
    "gated, half live": lambda problem: gated(problem, 0.5),
    "gated, all live, logits held": lambda problem: gated(problem, 2.0, logits_budget_bytes=GIB),
    "gated, half live, logits held": lambda problem: gated(problem, 0.5, logits_budget_bytes=GIB),
    "naive": naive,
    "checkpoint": checkpointed,
    "liger": liger,
    "trl": trl,
    "vocabulary": vocabulary,
}
# T, H, V, chunk, methods in the order they run
TABLES = {
    "small": (4096, 512, 32000, 512, list(METHODS)),
    "large": (8192, 1024, 32000, 512, ["floor", "chunked floor", "ours", "naive"]),
}
GROWTH = [(tokens, 256, 32000, 256) for tokens in (2048, 4096, 8192, 16384)]


def timed(names: list[str], problem: Problem, rounds: int) -> dict[str, tuple[float, float]]:
    """name -> (median seconds, median ratio to the same round's floor); methods that cannot run are left out."""
    seconds: dict[str, list[float]] = {}
    runs = {}
    for name in names:
        try:
            runs[name] = METHODS[name](problem)
        except ImportError as reason:
            print(f"    {name}: skipped, {reason}")
    for index in range(rounds + 1):
        for name, run in runs.items():
            problem.clear()
            gc.collect()
            start = time.perf_counter()
            run()
            if index:  # the first round warms up
                seconds.setdefault(name, []).append(time.perf_counter() - start)
    ratios = {name: [a / b for a, b in zip(taken, seconds["floor"], strict=True)] for name, taken in seconds.items()}
    return {name: (statistics.median(seconds[name]), statistics.median(ratios[name])) for name in seconds}


def allocator_peak(run: Callable[[], None]) -> int:
    """Bytes: the peak of allocations minus releases during `run`, from the profiler's record of each."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def resident_peak(run: Callable[[], None]) -> int:
    """Bytes by which this process's peak resident set passes what it held before; for a fresh process."""
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    run()
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 - before


def memory(name: str, size: tuple[int, int, int, int]) -> tuple[float, float] | None:
    """(allocator, resident) peak in MiB of one call, each in a process of its own."""
    peaks = []
    for kind in ("allocator", "resident"):
        command = [sys.executable, __file__, "--measure", name, kind, *map(str, size)]
        # a fixed threshold makes glibc hand large blocks back, so that what set-up freed does not hide what a call takes
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if result.returncode:
            print(f"    {name}: memory not measured, {result.stderr.strip().splitlines()[-1]}")
            return None
        peaks.append(float(result.stdout.split()[-1]))
    return peaks[0], peaks[1]


def measure(name: str, kind: str, size: list[int]) -> None:
    problem = Problem(*size)
    run = METHODS[name](problem)
    print((allocator_peak if kind == "allocator" else resident_peak)(run) / MIB)


def print_table(title: str, rounds: int) -> None:
    *size, names = TABLES[title]
    print(f"\n{title}: T={size[0]} H={size[1]} V={size[2]} fp32, chunk {size[3]}, median of {rounds} rounds")
    problem = Problem(*size)
    times = timed(names, problem, rounds)
    naive_seconds = times["naive"][0]
    del problem
    gc.collect()
    print("| method | seconds | x floor | x naive | extra MiB, allocator | extra MiB, resident |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, (seconds, ratio) in times.items():
        peaks = None if "floor" in name or name == "product" else memory(name, tuple(size))
        extra = "| |" if peaks is None else f"| {peaks[0]:.1f} | {peaks[1]:.0f} |"
        print(f"| {name} | {seconds:.2f} | {ratio:.3f} | {seconds / naive_seconds:.3f} {extra}", flush=True)


def print_growth() -> None:
    print(f"\ngrowth: single pass, H={GROWTH[0][1]} V={GROWTH[0][2]} fp32, chunk {GROWTH[0][3]}")
    print("| T | extra MiB, allocator | extra MiB, resident |\n| --- | --- | --- |")
    for size in GROWTH:
        allocator, resident = memory("ours", size)
        print(f"| {size[0]} | {allocator:.2f} | {resident:.0f} |", flush=True)


def print_paper() -> None:
    print("\non paper: T=32768 H=4096 V=128256 bf16, gradient of the weight summed into main_grad, sequence parallel")
    print("| TP | chunk | peak MiB a rank | naive MiB a rank |\n| --- | --- | --- | --- |")
    for ranks, chunk in ((1, 1024), (2, 2048), (4, 2048), (8, 2048)):
        plan = policy_head_memory(32768, 4096, 128256, tensor_parallel=ranks, chunk_tokens=chunk)
        print(f"| {ranks} | {chunk} | {plan.peak / MIB:.0f} | {plan.naive / MIB:.0f} |")
    print(policy_head_memory.__doc__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", choices=[*TABLES, "growth", "all"], default="all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--paper", action="store_true", help="only the formula's table")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.measure:
        measure(options.measure[0], options.measure[1], [int(value) for value in options.measure[2:]])
        return
    for title in TABLES:
        if not options.paper and options.table in (title, "all"):
            print_table(title, options.rounds)
    if not options.paper and options.table in ("growth", "all"):
        print_growth()
    if options.paper or options.table == "all":
        print_paper()


if __name__ == "__main__":
    main()
