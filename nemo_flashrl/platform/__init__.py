"""The one door to hardware: what differs between a GPU node and a CPU, and what upstream needs to run on the latter.

Nothing else in the package names a device type or a communication library. On a GPU `install` changes nothing
but what a version shim needs. On a CPU it redirects the calls that cpu_patches.py lists.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib.metadata
import os
import random
import re
import resource
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from nemo_flashrl.platform import megatron_016
from nemo_flashrl.platform.cpu_patches import Patch, torch_patches, upstream_patches

__all__ = ["accelerator", "install", "make_strategy"]

SUPPORTED_MEGATRON = ("0.15", "0.16")
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h

_installed: list[Patch] = []  # what is in force; empty on a GPU


@functools.cache
def has_gpu() -> bool:
    """True where a CUDA device is usable."""
    return torch.cuda.is_available()


def hide_gpus() -> None:
    """From this process and from those that it starts; called before anything has used one."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    has_gpu.cache_clear()


def device() -> torch.device:
    """The device that this process trains on."""
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu() else torch.device("cpu")


def accelerator() -> str:
    """Lightning's name of it."""
    return "gpu" if has_gpu() else "cpu"


def backend() -> str:
    """The collective library of torch.distributed."""
    return "nccl" if has_gpu() else "gloo"


def object_group() -> torch.distributed.ProcessGroup:
    """A group over all ranks that carries Python objects through host memory; first called by all ranks together."""
    return _host_group() if has_gpu() else torch.distributed.group.WORLD


@functools.cache
def _host_group() -> torch.distributed.ProcessGroup:
    return torch.distributed.new_group(backend="gloo")


def make_process_group(
    store: torch.distributed.Store, rank: int, size: int, timeout: float
) -> torch.distributed.Backend:
    """A group that has nothing to do with the default one, between processes that may be of different environments.

    Needs torch alone. A device of a GPU's collectives is that of the tensors. `timeout` is in seconds.

    Raises:
        ValueError: rank 0 has another library, or another version of it; they do not understand each other.
    """
    limit = timedelta(seconds=timeout)
    library = f"nccl {torch.cuda.nccl.version()}" if has_gpu() else "gloo"
    if rank == 0:
        store.set("library", library)
    elif (other := store.get("library").decode()) != library:
        raise ValueError(f"rank 0 communicates through {other}, rank {rank} through {library}: they must be the same")
    if not has_gpu():
        return torch.distributed.ProcessGroupGloo(store, rank, size, limit)
    options = torch.distributed.ProcessGroupNCCL.Options()
    options._timeout = 10 * limit  # torch ends the process at its own; callers give up, and abort, before it
    return torch.distributed.ProcessGroupNCCL(store, rank, size, options)


def memory_use() -> dict[str, float]:
    """This process's memory since the last call, GiB: the most in tensors, the most held, the device's, and retries.

    On a CPU the peak is the process's since its start, and the device is the machine.
    """
    if not has_gpu():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
        return {"memory_peak_gib": peak, "memory_reserved_gib": peak, "memory_total_gib": total, "memory_retries": 0.0}
    numbers = torch.cuda.memory_stats()
    torch.cuda.reset_peak_memory_stats()
    return {
        "memory_peak_gib": numbers["allocated_bytes.all.peak"] / 2**30,
        "memory_reserved_gib": numbers["reserved_bytes.all.peak"] / 2**30,
        "memory_total_gib": torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / 2**30,
        "memory_retries": float(numbers["num_alloc_retries"]),
    }


def host_tensor(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised memory of the host; where there is a GPU its pages are locked, so that copies run beside it."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=has_gpu())


def copied_numbers() -> int:
    """Of fp32, to be copied at a time between host and device and worked on there, with 12 bytes each in flight.

    On a GPU such a piece is some ten launches of 6 us, and 32 MiB take 0.6 ms over PCIe 5. On a CPU 2 MiB stay in the
    cache.
    """
    return 2**23 if has_gpu() else 2**19


def may_overlap_offload() -> bool:
    """Whether copies between host and device may run beside an offloaded optimizer's step.

    megatron.core.optimizer.cpu_offloading.hybrid_optimizer 0.15 waits for the wrong one of its two streams, so that a
    forward pass could begin with weights that are still on their way.
    """
    return _megatron_version() != "0.15"


def transformer_engine() -> tuple[int, ...]:
    """(major, minor) of the installed Transformer Engine, () without one."""
    try:
        version = importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def multiplies_fp8() -> bool:
    """Whether this process's GPU does (Ada, Hopper and newer)."""
    return torch.cuda.get_device_capability() >= (8, 9)


def describe() -> dict[str, str]:
    """What this machine offers: number and name of devices, memory of the first, versions; "" for what is not there."""
    count = torch.cuda.device_count() if has_gpu() else 0
    first = torch.cuda.get_device_properties(0) if count else None
    return {
        "torch": torch.__version__,
        "devices": str(count),
        "name": first.name if first else "",
        "memory_gib": f"{first.total_memory / 2**30:.1f}" if first else "0",
        "CUDA": torch.version.cuda or "",
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if count else "",
    }


def synchronize() -> None:
    """Wait for the device: what was copied to the host is there."""
    if has_gpu():
        torch.cuda.synchronize()


def model_overrides() -> dict[str, Any]:
    """Fields of a NeMo GPTConfig that this platform decides; Transformer Engine's layers need a GPU."""
    if has_gpu():
        return {}
    return {
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "cross_entropy_loss_fusion": False,
        "attention_softmax_in_fp32": True,
        "async_tensor_model_parallel_allreduce": False,
    }


def make_strategy(*, overlap_gradients: bool = False, **options: Any) -> Any:
    """NeMo's MegatronStrategy as this package uses it; gradients are reduced after the last backward pass or under it.

    NeMo's own progress printer is left out: it gathers timers over all ranks from rank 0 alone, which hangs the first
    save of a job with several processes (nemo.lightning.pytorch.callbacks.progress_printer 2.7).
    """
    import nemo.lightning as nl
    from megatron.core.distributed import DistributedDataParallelConfig

    distributed = DistributedDataParallelConfig(
        check_for_nan_in_grad=True,
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=has_gpu(),
        overlap_grad_reduce=overlap_gradients,
    )
    return nl.MegatronStrategy(
        ddp=distributed,
        replace_progress_bar=False,
        process_group_backend=backend(),
        ckpt_async_save=False,  # a checkpoint that is reported is on the disk
        ckpt_optim_fully_reshardable=True,  # a distributed optimizer's state fits other parallel sizes too
        # Else every data-parallel rank gathers the whole state of its model-parallel rank in host memory.
        distrib_optim_fully_reshardable_mem_efficient=True,
        **options,
    )


def seed_model_parallel(seed: int) -> None:
    """Seed dropout's generators for this rank's place; Megatron does it itself only where there is a GPU."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def random_state() -> dict[str, Any]:
    """The state of every random generator of this process: Python's, NumPy's, torch's, Megatron's."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state() if has_gpu() else None,
        "megatron": get_cuda_rng_tracker().get_states(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Draw from now on what followed when `state` was taken."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if has_gpu():
        torch.cuda.set_rng_state(state["device"])
    get_cuda_rng_tracker().set_states(state["megatron"])


def install() -> None:
    """Make NeMo and Megatron run here; idempotent, called before either is imported."""
    if _installed:
        return
    if _megatron_version() == "0.16":
        megatron_016.install()
    if has_gpu():
        return
    _keep_freed_memory()
    for patches in (torch_patches, upstream_patches):  # torch first: importing the others needs it
        for patch in patches():
            setattr(patch.owner, patch.name, patch.replacement)
            _installed.append(patch)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """No garbage collection while NeMo is imported: 800,000 objects, none of them garbage, walked again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _keep_freed_memory() -> None:
    """Leave what is freed in glibc's heap: large tensors would else be mapped, and cleared by page, in every step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


def _megatron_version() -> str:
    found = importlib.metadata.version("megatron-core")
    version = ".".join(found.split(".")[:2])
    if version not in SUPPORTED_MEGATRON:
        raise ImportError(f"megatron-core {found} is installed; supported: {', '.join(SUPPORTED_MEGATRON)}")
    return version
