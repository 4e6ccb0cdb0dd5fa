"""Time and memory of one policy-gradient loss over an output layer, beside other definitions of it.

    OMP_NUM_THREADS=1 python benchmarks/policy_head.py                # every table below; about 20 minutes
    OMP_NUM_THREADS=1 python benchmarks/policy_head.py --table small --rounds 5
    python benchmarks/policy_head.py --paper                          # peak per rank of a large job, from the formula

Time: one thread, CPU seconds of the process, so that other jobs' turns do not count. In a round every method runs once;
of each the best round is taken, since a busy machine only ever adds. Ratios are to the floor: three bare matrix
products of that size, full size, into preallocated matrices.

Memory is exact at the allocator: torch's profiler reports each allocation and release, and the peak of their running
sum is what a call took beyond hidden, weight and targets, gradients included. A process of its own per case also
reports by how much its resident set peaked, which sees what BLAS takes for itself.

The methods are described in `policy_head_methods.py`.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from allocations import allocator_peak
from policy_head_methods import METHODS
from policy_head_problem import Problem

from nemo_flashrl.ops.memory import policy_head_memory

MIB = 2**20


OURS = ["ours", "ours, into main_grad", "gated, all live", "gated, half live"]
# T, H, V, chunk, methods in the order they run
TABLES = {
    "small": (4096, 512, 32000, 512, list(METHODS)),
    "chunk": (4096, 512, 32000, 1024, ["floor", "chunked floor", *OURS, "naive"]),
    "large": (8192, 1024, 32000, 512, ["floor", "chunked floor", "ours", "ours, into main_grad", "naive"]),
}
GROWTH = [(tokens, 256, 32000, 256) for tokens in (2048, 4096, 8192, 16384)]


def timed(names: list[str], problem: Problem, rounds: int) -> dict[str, float]:
    """name -> best CPU seconds; methods that cannot run here are left out, with the reason."""
    runs = {}
    for name in names:
        try:
            runs[name] = METHODS[name](problem)
        except ImportError as reason:
            print(f"    {name}: skipped, {reason}")
    best = dict.fromkeys(runs, float("inf"))
    for index in range(rounds + 1):
        for name, run in runs.items():
            problem.clear()
            gc.collect()
            start = time.process_time()
            run()
            if index:  # the first round warms up
                best[name] = min(best[name], time.process_time() - start)
    return best


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
        # a fixed threshold makes glibc hand large blocks back, so that what set-up freed does not hide what a call
        # takes
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


def print_table(title: str, rounds: int, with_memory: bool) -> None:
    *size, names = TABLES[title]
    print(f"\n{title}: T={size[0]} H={size[1]} V={size[2]} fp32, chunk {size[3]}, best of {rounds} rounds", flush=True)
    problem = Problem(*size)
    best = timed(names, problem, rounds)
    del problem
    gc.collect()
    print("| method | seconds | x floor | x naive | extra MiB, allocator | extra MiB, resident |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, seconds in best.items():
        bare = "floor" in name or name == "product" or not with_memory
        peaks = None if bare else memory(name, tuple(size))
        extra = "| | |" if peaks is None else f"| {peaks[0]:.1f} | {peaks[1]:.0f} |"
        ratio = f"{seconds / best['floor']:.3f} | {seconds / best['naive']:.3f}"
        print(f"| {name} | {seconds:.2f} | {ratio} {extra}", flush=True)


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
    parser.add_argument("--no-memory", action="store_true", help="times only")
    parser.add_argument("--paper", action="store_true", help="only the formula's table")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.measure:
        measure(options.measure[0], options.measure[1], [int(value) for value in options.measure[2:]])
        return
    for title in TABLES:
        if not options.paper and options.table in (title, "all"):
            print_table(title, options.rounds, not options.no_memory)
    if not options.paper and options.table in ("growth", "all"):
        print_growth()
    if options.paper or options.table == "all":
        print_paper()


if __name__ == "__main__":
    main()
