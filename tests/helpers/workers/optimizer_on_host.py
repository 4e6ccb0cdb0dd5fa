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
    """What is computed from one is of the device too."""

    is_cuda = True

    def cpu(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    def type(self, *args, **kwargs):
        plain = self.as_subclass(torch.Tensor)
        return plain.type(*args, **kwargs) if args or kwargs else plain.type().replace("torch.", "torch.cuda.")


def put_on_device(model: torch.nn.Module) -> None:
    """The parameters, with what Megatron has noted on them."""
    moved: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                new = torch.nn.Parameter(parameter.data.as_subclass(DeviceTensor), parameter.requires_grad)
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


class Held(pl.Callback):
    """Bytes of this rank by what holds them, after the last step; the weights and gradients of each step."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.bytes, self.weights, self.gradients = vocab_size, {}, [], []

    def on_megatron_step_end(self, step, **_) -> None:
        from nemo_flashrl.weights.shards import stream_hf_tensors, unwrap

        model = unwrap(step.pipeline.module.module)
        self.gradients.append(copies(stream_hf_tensors(model, self.vocab_size, lambda p: p.main_grad)))

    def on_train_batch_end(self, trainer, model, *_) -> None:
        from nemo_flashrl.weights.shards import stream_hf_tensors, unwrap

        self.weights.append(copies(stream_hf_tensors(unwrap(model), self.vocab_size)))
        self.bytes = {
            "weights": sum(p.nbytes for p in model.parameters()),
            "gradients": sum(p.main_grad.nbytes for p in model.parameters() if p.requires_grad),
            "optimizer": 0,
            "host_optimizer": 0,
        }
        for optimizer in trainer.optimizers:
            for one in optimizer.mcore_optimizer.chained_optimizers:
                for tensor in state_of(one):
                    place = "optimizer" if isinstance(tensor, DeviceTensor) else "host_optimizer"
                    self.bytes[place] += tensor.nbytes


def state_of(optimizer) -> list[torch.Tensor]:
    """Every tensor that Megatron's optimizer holds beside the model's own weights and gradients."""
    inner = optimizer.optimizer
    hybrid = isinstance(inner, HybridDeviceOptimizer)
    held = [p for group in optimizer.shard_fp32_from_float16_groups for p in group if p is not None]
    for one in inner.sub_optimizers if hybrid else [inner]:
        parameters = [p for group in one.param_groups for p in group["params"]] if hybrid else []
        held += parameters
        held += [p.grad.as_subclass(type(p)) for p in parameters if p.grad is not None and p.grad._base is None]
        held += [value for state in one.state.values() for name, value in state.items() if name in ADAM]
    return held


ADAM = ("exp_avg", "exp_avg_sq", "master_param")


def main(model_folder: Path, trajectories: Path, out: Path, vocab_size: int, *overrides: str, device: bool) -> None:
    """`device`: whether there is one, and with it the distributed optimizer."""
    platform.install()
    if device:
        pretend()
        install_fused_adam()
    driver = Driver(trajectories) if os.environ["RANK"] == "0" else None
    held = Held(vocab_size)
    trainer, model, data = make_run(model_folder, out, vocab_size, driver, [held], overrides, gate=False)
    trainer.strategy.ddp_config.use_distributed_optimizer = device
    trainer.fit(model, datamodule=data)
    found = {"bytes": held.bytes, "weights": held.weights, "gradients": held.gradients}
    torch.save(found, out.with_suffix(f".{torch.distributed.get_rank()}"))
