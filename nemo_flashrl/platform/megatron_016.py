"""What NeMo 2.7 asks of megatron-core that 0.16 no longer has, so that the two run together (NGC 26.02 pairs them)."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any


def install() -> None:
    """Fill the two gaps below; called before NeMo is imported, with 0.16 alone."""
    _provide_tensorstore_module()
    from megatron.core import optimizer

    optimizer.get_megatron_optimizer = _without_conditions(optimizer.get_megatron_optimizer)


def _provide_tensorstore_module() -> None:
    """nemo.utils.callbacks.dist_ckpt_io imports it for zarr checkpoints of NeMo 1, which we neither write nor read."""
    from megatron.core.dist_checkpointing import strategies

    class TensorStoreLoadShardedStrategy:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            raise ValueError("zarr checkpoints need megatron-core 0.15: convert the checkpoint with it first")

    module = types.ModuleType(f"{strategies.__name__}.tensorstore")
    module.TensorStoreLoadShardedStrategy = TensorStoreLoadShardedStrategy
    sys.modules[module.__name__] = strategies.tensorstore = module


def _without_conditions(build: Callable) -> Callable:
    """nemo.lightning._strategy_lib.setup_megatron_optimizer passes arguments that `config_overrides` has replaced."""

    @functools.wraps(build)
    def call(
        *args: Any, no_weight_decay_cond: Any = None, scale_lr_cond: Any = None, lr_mult: float = 1.0, **kwargs: Any
    ) -> Any:
        if no_weight_decay_cond is not None or scale_lr_cond is not None or lr_mult != 1.0:
            raise ValueError("no_weight_decay_cond, scale_lr_cond and lr_mult need megatron-core 0.15")
        return build(*args, **kwargs)

    return call
