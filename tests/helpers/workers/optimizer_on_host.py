"""Steps of the real trainer in bf16 under Megatron's distributed optimizer, and what it then holds where.

Nothing here is a GPU. The device's tensors are a subclass of Tensor on the CPU that answers what Megatron asks of one;
what `cpu()` makes of it is plain, the host's. FusedAdam is the stand-in in fused_adam.py.
"""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import lightning.pytorch as pl
import torch
from fused_adam import install_fused_adam
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

from nemo_flashrl import build, platform
from nemo_flashrl.models import PolicyModel
from workers.parity import Driver, copies, make_run


class DeviceTensor(torch.Tensor):
    """What is made from one without a gradient, like state of an optimizer, is of the device too."""

    is_cuda = True

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
        plain = type(made) is torch.Tensor and not made.requires_grad
        return torch.Tensor._make_subclass(cls, made) if plain else made

    def cpu(self) -> torch.Tensor:
        return host(self)

    def __reduce_ex__(self, protocol):  # in a checkpoint's file
        return host(self).__reduce_ex__(protocol)

    def type(self, *args, **kwargs):
        plain = host(self)
        return plain.type(*args, **kwargs) if args or kwargs else plain.type().replace("torch.", "torch.cuda.")


def host(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in a plain tensor."""
    return torch.Tensor._make_subclass(torch.Tensor, tensor)


def put_on_device(model: torch.nn.Module) -> None:
    """The parameters, with what Megatron has noted on them."""
    moved: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                data = torch.Tensor._make_subclass(DeviceTensor, parameter.data)
                new = torch.nn.Parameter(data, parameter.requires_grad)
                new.__dict__.update(parameter.__dict__)
                module._parameters[name] = moved.setdefault(id(parameter), new)


def pretend() -> None:
    """Parameters come to lie on the device, and host memory need not be pinned."""
    configure = PolicyModel.configure_model

    def configured(self, *args, **kwargs) -> None:
        configure(self, *args, **kwargs)
        put_on_device(self.module)

    def distributed(config):
        with mock.patch.object(platform, "has_gpu", lambda: True):
            return made(config)

    made, build.build_optimizer_config = build.build_optimizer_config, distributed
    PolicyModel.configure_model = configured
    torch.Tensor.pin_memory = lambda self, *args: self


class SavedDriver(Driver):
    """Has nothing that a checkpoint would have to hold."""

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None: ...


class Held(pl.Callback):
    """Bytes of this rank by what holds them, after the last step; the weights and gradients of each step."""

    def __init__(self, vocab_size: int, save: Path | None) -> None:
        self.save, self.vocab_size = save, vocab_size
        self.bytes, self.weights, self.gradients = {}, [], []

    def on_megatron_step_end(self, step, **_) -> None:
        from nemo_flashrl.weights.shards import stream_hf_tensors, unwrap

        model = unwrap(step.pipeline.module.module)
        self.gradients.append(copies(stream_hf_tensors(model, self.vocab_size, lambda p: p.main_grad)))

    def on_train_batch_end(self, trainer, model, *_) -> None:
        from nemo_flashrl.weights.shards import stream_hf_tensors, unwrap

        weights = copies(stream_hf_tensors(unwrap(model), self.vocab_size))
        self.weights.append({name: host(tensor) for name, tensor in weights.items()})
        self.bytes = {
            "weights": sum(p.nbytes for p in model.parameters()),
            "gradients": sum(p.main_grad.nbytes for p in model.parameters() if p.requires_grad),
            "optimizer": 0,
            "host_optimizer": 0,
        }
        buffers = {p.main_grad.untyped_storage().data_ptr() for p in model.parameters() if p.requires_grad}
        for optimizer in trainer.optimizers:
            for one in optimizer.mcore_optimizer.chained_optimizers:
                for tensor in state_of(one, buffers):
                    place = "optimizer" if isinstance(tensor, DeviceTensor) else "host_optimizer"
                    self.bytes[place] += tensor.nbytes
        if self.save:
            trainer.save_checkpoint(self.save)


def state_of(optimizer, buffers: set[int]) -> list[torch.Tensor]:
    """Every tensor that Megatron's optimizer holds beside the model's weights, and the `buffers` of its gradients."""
    inner = optimizer.optimizer
    hybrid = isinstance(inner, HybridDeviceOptimizer)
    held = [p for group in getattr(optimizer, "shard_fp32_from_float16_groups", ()) for p in group if p is not None]
    for one in inner.sub_optimizers if hybrid else [inner]:
        parameters = [p for group in one.param_groups for p in group["params"]] if hybrid else []
        held += [*parameters, *(p.grad for p in parameters if p.grad is not None)]
        held += [value for state in one.state.values() for name, value in state.items() if name in ADAM]
    by_storage = {tensor.untyped_storage().data_ptr(): tensor for tensor in held}  # one may be named twice
    return [tensor for place, tensor in by_storage.items() if place not in buffers]


ADAM = ("exp_avg", "exp_avg_sq", "master_param")


def main(
    model_folder: Path,
    trajectories: Path,
    out: Path,
    vocab_size: int,
    *overrides: str,
    device: bool,
    save: Path | None = None,
    resume: Path | None = None,
) -> None:
    """`device`: whether there is one, and with it the distributed optimizer; `save` and `resume`: a checkpoint."""
    platform.install()
    if device:
        pretend()
        install_fused_adam()
    driver = SavedDriver(trajectories) if os.environ["RANK"] == "0" else None
    held = Held(vocab_size, save)
    trainer, model, data = make_run(model_folder, out, vocab_size, driver, [held], overrides, gate=False)
    trainer.strategy.ddp_config.use_distributed_optimizer = device
    trainer.fit(model, datamodule=data, ckpt_path=resume)
    found = {"bytes": held.bytes, "weights": held.weights, "gradients": held.gradients}
    torch.save(found, out.with_suffix(f".{torch.distributed.get_rank()}"))
