"""What NeMo and Megatron ask of a GPU, redirected for a CPU: each call with the upstream place that makes it."""

from __future__ import annotations

import contextlib
import copy
import functools
import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Patch:
    """One redirected attribute; `reason` names the upstream file and symbol that needs it."""

    owner: Any
    name: str
    replacement: Any
    reason: str


def _is_cuda(value: Any) -> bool:
    return isinstance(value, (str, torch.device)) and str(value).startswith("cuda")


def _on_cpu(function: Callable) -> Callable:
    """`function` with device="cuda" and pin_memory turned away."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return call


def _to_cpu(function: Callable) -> Callable:
    """`Tensor.to` and `Module.to` with a CUDA target read as the CPU."""

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple("cpu" if _is_cuda(arg) else arg for arg in args)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return function(self, *args, **kwargs)

    return call


def _gpu_type_name(parameter: torch.nn.Parameter, *args: Any, **kwargs: Any) -> Any:
    """`Parameter.type` with the name that a GPU's parameter of this dtype has; conversions stay as they are."""
    if args or kwargs:
        return torch.Tensor.type(parameter, *args, **kwargs)
    return torch.Tensor.type(parameter).replace("torch.", "torch.cuda.")


def _eager(function: Callable | None = None, **options: Any) -> Callable:
    """`torch.compile`, as a decorator with or without options, that leaves a function as it is."""
    return function or _eager


def _compile_nothing(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("nothing is compiled for a GPU where there is none")


class _NoStream:
    """Stands for a stream or an event: there is one queue, and it is in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable:
        return lambda *args, **kwargs: None

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> _NoStream:
        return self


def no_compilation() -> Patch:
    """What importing Megatron needs beside a CUDA toolkit and no GPU; the other patches are for what runs."""
    from torch.utils import cpp_extension

    return Patch(
        cpp_extension,
        "load_inline",
        _compile_nothing,
        "megatron.core.inference.unified_memory 0.15: compiles CUDA code when imported, which beside nvcc and without "
        "a GPU ends in an IndexError of torch's that it does not expect",
    )


def torch_patches() -> list[Patch]:
    cpu = torch.device("cpu")
    factories = (
        "tensor zeros ones empty full arange rand randn randint as_tensor zeros_like ones_like empty_like full_like"
    )
    patches = [
        Patch(torch, name, _on_cpu(getattr(torch, name)), 'megatron.core and nemo.lightning: device="cuda" literals')
        for name in factories.split()
    ]
    patches += [
        Patch(torch.Tensor, "to", _to_cpu(torch.Tensor.to), 'nemo megatron_strategy.training_step: .to("cuda")'),
        Patch(torch.Tensor, "cuda", lambda self, *a, **k: self, "megatron.core.utils, schedules: Tensor.cuda()"),
        Patch(torch.nn.Parameter, "type", _gpu_type_name, "megatron.core.optimizer 0.15, 0.16: refuses other names"),
        Patch(torch, "compile", _eager, "megatron.core.jit: imports the compiler, for fusions that a CPU does not use"),
        no_compilation(),
        Patch(torch.nn.Module, "cuda", lambda self, *a, **k: self, "nemo megatron_parallel.init_model_parallel"),
    ]
    calls: dict[str, tuple[Any, str]] = {
        "current_device": (lambda: cpu, "megatron.core.tensor_parallel.layers, pipeline p2p: device of a new tensor"),
        "set_device": (lambda *a: None, "nemo.lightning.pytorch.strategies.utils.init_model_parallel"),
        "synchronize": (lambda *a: None, "megatron.core.timers, dist_checkpointing async saves"),
        "current_stream": (_NoStream, "megatron.core.distributed.param_and_grad_buffer"),
        "stream": (contextlib.nullcontext, "nemo megatron_parallel.init_model_parallel: DDP on a side stream"),
        "Stream": (_NoStream, "megatron.core.distributed, dist_checkpointing filesystem_async"),
        "Event": (_NoStream, "megatron.core.distributed.param_and_grad_buffer"),
        "get_rng_state": (lambda *a, **k: torch.get_rng_state(), "megatron.core.tensor_parallel.random: RNG tracker"),
        "set_rng_state": (
            lambda s, *a, **k: torch.set_rng_state(s),
            "megatron.core.tensor_parallel.random: RNG tracker",
        ),
        "manual_seed": (lambda seed: torch.manual_seed(seed), "megatron.core.tensor_parallel.random: RNG tracker"),
    }
    patches += [Patch(torch.cuda, name, call, reason) for name, (call, reason) in calls.items()]
    return patches


def upstream_patches() -> list[Patch]:
    return [*model_patches(), *checkpoint_patches()]


def model_patches() -> list[Patch]:
    from megatron.core.optimizer import optimizer
    from megatron.core.tensor_parallel import random as parallel_random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    return [
        Patch(
            TransformerConfig,
            "__post_init__",
            _without_gpu_kernels(TransformerConfig.__post_init__),
            "megatron.core.transformer.transformer_config 0.15: NeMo's configurations of Llama and of experts ask "
            "for kernels of Transformer Engine in their defaults, which is refused before a caller can unset them",
        ),
        Patch(
            WrappedTorchNorm,
            "__new__",
            staticmethod(_norm_with_sequence_parallelism(WrappedTorchNorm.__new__)),
            "megatron.core.transformer.torch_norm 0.15: torch's norms are refused under sequence parallelism",
        ),
        Patch(moe_utils, "te_general_gemm", None, "megatron.core.transformer.moe.moe_utils 0.15: undefined without TE"),
        Patch(
            token_dispatcher,
            "maybe_move_tensor_to_cpu",
            _as_numpy,
            "megatron.core.transformer.moe.token_dispatcher 0.15: leaves as a tensor what is on the CPU already, and "
            "torch.distributed's all-to-all wants numbers",
        ),
        Patch(
            optimizer,
            "clip_grad_by_total_norm_fp32",
            _clip_grad_by_total_norm,
            "megatron.core.optimizer.clip_grads 0.15: asserts that gradients are torch.cuda.FloatTensor",
        ),
        Patch(
            parallel_random,
            "_set_cuda_rng_state",
            lambda state, device=-1, graph_safe=False: torch.set_rng_state(state),
            "megatron.core.tensor_parallel.random 0.15: writes the state of a CUDA generator",
        ),
        Patch(
            parallel_random,
            "_get_cuda_rng_state",
            lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state(),
            "megatron.core.tensor_parallel.random 0.15: reads the state of a CUDA generator",
        ),
    ]


def checkpoint_patches() -> list[Patch]:
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from nemo.lightning import callback_group
    from nemo.lightning.io import pl as pl_io

    patches = [
        Patch(
            filesystem_async,
            "_get_write_results_queue",
            queue.Queue,
            "megatron.core.dist_checkpointing.strategies.filesystem_async 0.15: spawns a manager process, needed by "
            "asynchronous saves alone, which imports __main__ again and outlives a killed run",
        ),
        Patch(
            filesystem_async.FileSystemWriterAsync,
            "write_preloaded_data_multiproc",
            staticmethod(_write_in_this_process),
            "megatron.core.dist_checkpointing.strategies.filesystem_async 0.15: forks writers, which a process with "
            "threads of its own must not, and which write on when it is killed",
        ),
        Patch(pl_io, "_fix_tensors_device", lambda checkpoint: checkpoint, "nemo.lightning.io.pl 2.7: asserts CUDA"),
    ]
    group = callback_group.CallbackGroup.get_instance()
    patches.append(
        Patch(group, "_callbacks", [], "nemo.lightning.callback_group 2.7: OneLogger raises on save unless configured")
    )
    return patches


def _without_gpu_kernels(check: Callable) -> Callable:
    @functools.wraps(check)
    def call(self: Any) -> None:
        self.apply_rope_fusion = False
        self.persist_layer_norm = False
        self.moe_permute_fusion = False
        check(self)

    return call


def _as_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _norm_with_sequence_parallelism(build: Callable) -> Callable:
    """The norm itself is right on a shard of the sequence; its weight only has to say that its gradient is partial."""

    @functools.wraps(build)
    def call(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        whole = copy.copy(config)
        whole.sequence_parallel = False
        norm = build(cls, whole, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    return call


def _clip_grad_by_total_norm(
    parameters: Any, max_norm: float, total_norm: float, use_decoupled_grad: bool = False
) -> None:
    """Scale gradients in place to a total norm of at most `max_norm`, as upstream does on a GPU."""
    coefficient = max_norm / (total_norm + 1.0e-6)
    if coefficient >= 1.0:
        return
    for parameter in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
        grad = parameter.decoupled_grad if use_decoupled_grad else parameter.grad
        if grad is not None:
            grad.mul_(coefficient)


def _system_error(error: BaseException) -> BaseException:
    """A full disk, where that is behind what torch's writer says about positions in its file."""
    step: BaseException | None = error
    while step is not None and not isinstance(step, OSError):
        step = step.__cause__ or step.__context__
    return step or error


def _write_in_this_process(
    transforms: list, use_msc: bool, rank: int, write_buckets: list, global_results: queue.Queue
) -> None:
    """Write a rank's files one after the other; the results by number, or the first error, go to `global_results`."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    written: Any = {}
    results, begun = queue.Queue(), queue.Queue()
    for number, bucket in enumerate(write_buckets):
        begun.put(number)
        FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, results, begun, True, use_msc=use_msc)
        _, written_or_error = results.get()
        if isinstance(written_or_error, Exception):
            written = _system_error(written_or_error)
            break
        written[number] = written_or_error
    global_results.put(written)
