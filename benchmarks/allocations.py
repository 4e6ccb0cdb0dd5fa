"""What tensors hold at most while something runs."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch


def allocator_peak(run: Callable[[], object]) -> int:
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
