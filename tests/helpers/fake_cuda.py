"""CUDA without a GPU: tensors have the shapes, types and devices of a real step, and no values.

    fake_cuda.install()                 before torch is imported, in a process of its own
    fake_cuda.make_world(64, rank=32)   process groups of any size whose other ranks do nothing
    fake_cuda.seem_to_have_cuda()
    with gpu_recorder.Recorder(answers) as recorder:
        ...                             launches, host syncs, bytes moved, peak memory; a device mismatch raises

What the host would take from the values of a tensor, a sync, is answered by the test that runs it, by the place that
asks.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_recorder import compile_as_one_kernel

GUARD = Path(__file__).with_name("fake_cuda_guard.cpp")
CACHE = Path(__file__).parents[2] / ".pytest_cache" / "fake_cuda"
_guard: ctypes.CDLL | None = None


def compiler() -> str | None:
    """A C++ compiler, which the guard needs."""
    return shutil.which(os.environ.get("CXX", "c++"))


def build_guard() -> Path:
    """The compiled guard, for the installed torch; some seconds where it is not there yet."""
    torch_folder = Path(importlib.util.find_spec("torch").submodule_search_locations[0])
    version = (torch_folder / "version.py").read_bytes()
    built = CACHE / f"{hashlib.sha256(GUARD.read_bytes() + version).hexdigest()[:16]}.so"
    if not built.is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        partial = built.with_suffix(f".{os.getpid()}")
        libraries = torch_folder / "lib"
        flags = ["-std=c++20", "-O0", "-w", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", f"-L{libraries}"]
        command = [
            compiler(),
            *flags,
            str(GUARD),
            "-o",
            str(partial),
            "-ltorch_cpu",
            "-lc10",
            f"-Wl,-rpath,{libraries}",
        ]
        subprocess.run(command, check=True, capture_output=True, text=True)
        partial.rename(built)
    return built


def is_installed() -> bool:
    return _guard is not None


def install() -> None:
    """Load the guard, which torch looks for once, when it is imported; then torch, and what would start a GPU later."""
    global _guard
    assert "torch" not in sys.modules
    _guard = ctypes.CDLL(str(build_guard()))
    import torch._dynamo
    import torch.utils.checkpoint  # noqa: F401


def seem_to_have_cuda() -> None:
    """What Python asks of torch.cuda, from now on, as on a Hopper GPU. Before Megatron is imported, which asks then."""
    import torch

    if torch.compile is compile_as_one_kernel:
        return

    class Stream:
        cuda_stream = 0
        device = torch.device("cuda", 0)

        def __init__(self, *_: Any, **__: Any) -> None: ...

        def __enter__(self) -> Stream:
            return self

        def __exit__(self, *_: Any) -> None: ...

        def __getattr__(self, name: str) -> Callable:
            return lambda *_, **__: None

        def query(self) -> bool:
            return True

        def record_event(self, event: Any = None) -> Stream:
            return self

    def nothing(*_: Any, **__: Any) -> None: ...

    torch.cuda.Stream = torch.cuda.Event = Stream
    for name in ("set_device", "synchronize", "_lazy_init", "manual_seed", "set_rng_state", "empty_cache"):
        setattr(torch.cuda, name, nothing)
    for name in ("stream", "current_stream", "default_stream"):
        setattr(torch.cuda, name, lambda *_, **__: Stream())
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = nothing
    answers = {
        **{"is_available": True, "is_initialized": True, "is_current_stream_capturing": False, "current_device": 0},
        **{"device_count": 8, "get_device_capability": (9, 0), "get_device_name": "NVIDIA H800"},
        **{"memory_allocated": 0, "max_memory_allocated": 0, "get_rng_state": None},
    }
    for name, value in answers.items():
        setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    empty = torch.empty

    @functools.wraps(empty)
    def unpinned(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return empty(*shape, **options)  # pages of a fake tensor cannot be locked

    torch.empty = unpinned
    torch.Tensor.pin_memory = lambda self, *_: self
    torch.compile = compile_as_one_kernel
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") is then a copy, as it is on a GPU


def make_world(size: int, rank: int = 0) -> None:
    """The default group, of ranks that are alike: a collective of objects finds this rank's everywhere."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    real_group = dist.new_group

    def new_group(*arguments: Any, **options: Any) -> Any:
        options.pop("pg_options", None)
        return real_group(*arguments, **options | {"backend": "fake"})

    def gather(out: list, own: Any, group: Any = None) -> None:
        out[:] = [own] * len(out)

    for module in (dist, dist.distributed_c10d):
        module.new_group, module.all_gather_object = new_group, gather
        module.broadcast_object_list = lambda *_, **__: None
