"""How a kernel of Transformer Engine looks to the counters of fake CUDA."""

import sys
from collections.abc import Callable


def one_kernel(function: Callable) -> Callable:
    """One launch on fake CUDA, whose temporaries take nothing; elsewhere `function` itself."""
    recorder = sys.modules.get("gpu_recorder")
    return recorder.one_kernel(function) if recorder else function
