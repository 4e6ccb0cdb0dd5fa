"""What a check of tests/gpu measures on: a GPU, or fake CUDA, where the same lines run and no number has a meaning."""

from __future__ import annotations

import gc
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import fake_cuda
import torch
from gpu_recorder import Answer, Recorder, site

from nemo_flashrl.ops import kernels

Syncs = list[list[Any]]  # file, text of the line, kind, count


class Device:
    """Entered once in a process. Fake CUDA needs `answers` to what the host asks; numbers that a check reads are 0.

    `is_real`: values and times mean something.
    """

    def __init__(self, answers: Sequence[Answer] = ()) -> None:
        self.name, self.is_real = "cuda", not fake_cuda.is_installed()
        self.answers = answers
        self.recorder: Recorder | None = None

    def __enter__(self) -> Device:
        gc.freeze()  # what NeMo has imported is not walked again by each collection
        if self.is_real:
            torch.cuda.set_device(0)
            torch.cuda.reset_peak_memory_stats()
        else:
            fake_cuda.seem_to_have_cuda()
            kernels.HAS_TRITON = True  # as in the image; fake tensors need its operators' shapes alone
            self.recorder = Recorder([*self.answers, Answer("workers/check_", "", 0.0)]).__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.recorder is not None:
            self.recorder.__exit__(*error)

    @property
    def memory(self) -> int:
        """Bytes of the whole GPU; of an H200 where it is fake."""
        return torch.cuda.get_device_properties(0).total_memory if self.is_real else 143_771 * 2**20

    @property
    def held(self) -> int:
        return torch.cuda.memory_allocated() if self.is_real else self.recorder.current

    @property
    def reserved(self) -> int | None:
        """Bytes that torch's allocator holds; it has none where the GPU is fake."""
        return torch.cuda.max_memory_reserved() if self.is_real else None

    def generator(self) -> torch.Generator:
        """With a seed; fake numbers are drawn from any."""
        return torch.Generator("cuda" if self.is_real else "cpu").manual_seed(0)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def warm_up(self, function: Callable[[], Any]) -> None:
        """Kernels are tuned, which waits and takes memory; not on a fake GPU."""
        if self.is_real:
            function()
            torch.cuda.synchronize()

    def peak_of(self, function: Callable[[], Any]) -> int:
        """Bytes in tensors at most while it runs."""
        gc.collect()
        if not self.is_real:
            self.recorder.restart()
            function()
            return self.recorder.peak
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def milliseconds(self, function: Callable[[], Any], rounds: int) -> float | None:
        """The median of some calls; on a fake GPU None, without a call."""
        if not self.is_real:
            return None
        times = []
        for _ in range(rounds):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            stop.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(stop))
        return statistics.median(times)

    def peak_and_waits_of(self, function: Callable[[], Any]) -> tuple[int, Syncs]:
        """Both, of a call each; a fake GPU counts both in one."""
        if self.is_real:
            return self.peak_of(function), self.waits_of(function)
        waits = self.waits_of(function)
        return self.recorder.peak, waits

    def waits_of(self, function: Callable[[], Any]) -> Syncs:
        """Host syncs while it runs: those that torch.cuda.set_sync_debug_mode knows, by the line that asks."""
        if not self.is_real:
            self.recorder.restart()
            function()
            return [[where.file, where.text, kind, n] for (where, kind), n in sorted(self.recorder.syncs.items())]
        counts: Counter = Counter()

        def note(message: Warning | str, *_: Any, **__: Any) -> None:
            if "synchronizing" in str(message):
                counts[site(innermost=True)] += 1

        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            # Within this thread the backward pass is asked for by its own lines too.
            with warnings.catch_warnings(), torch.autograd.set_multithreading_enabled(False):
                warnings.simplefilter("always")
                warnings.showwarning = note
                function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return [[where.file, where.text, "sync", n] for where, n in sorted(counts.items())]


def join_world(size: int = 1, rank: int = 0) -> None:
    """The default group: of fake ranks, or of this process alone."""
    if fake_cuda.is_installed():
        fake_cuda.make_world(size, rank)
    else:
        torch.cuda.set_device(0)
        torch.distributed.init_process_group("nccl")


def head_answers(live: int, scale: float = 1.0) -> list[Answer]:
    """What the policy head's looks find where a mask leaves so many tokens."""
    return [
        Answer("ops/head.py", "seen[", False),
        Answer("ops/chunks.py", "selected.all()", False),
        Answer("ops/chunks.py", "counts.", live),
        Answer("nemo_flashrl/", "any()", False),
        Answer("ops/", "grad_output", scale),
    ]
