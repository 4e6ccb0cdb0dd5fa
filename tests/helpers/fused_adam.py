"""Stands in for Transformer Engine's FusedAdam (2.9), whose kernels need a GPU: the same state in the same dtypes."""

from __future__ import annotations

import sys
from types import ModuleType

import torch
from gpu_recorder import one_kernel


class FusedAdam(torch.optim.Optimizer):
    """Adam whose state has dtypes of its own; reads `decoupled_grad`, keeps the fp32 weights of bf16 parameters."""

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        amsgrad=False,
        *,
        bias_correction=True,
        adam_w_mode=True,
        capturable=False,
        master_weights=False,
        master_weight_dtype=torch.float32,
        exp_avg_dtype=torch.float32,
        exp_avg_sq_dtype=torch.float32,
        use_decoupled_grad=False,
        store_param_remainders=False,
        set_grad_none=None,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        assert bias_correction and adam_w_mode and not (store_param_remainders or amsgrad or capturable)
        self.master_weights, self.use_decoupled_grad = master_weights, use_decoupled_grad
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, "master_param": master_weight_dtype}

    def initialize_state(self, param, store_param_remainders=False):
        for name in ("exp_avg", "exp_avg_sq"):
            self.state[param][name] = torch.zeros_like(param, dtype=self.dtypes[name])
        if self.master_weights:
            self.state[param]["master_param"] = param.detach().to(self.dtypes["master_param"])

    def get_unscaled_state(self, param, name):
        return self.state[param][name].float()

    def set_scaled_state(self, param, name, value):
        assert value.dtype == torch.float32
        if name not in self.state[param]:
            self.state[param][name] = torch.empty_like(param, dtype=self.dtypes[name])
        self.state[param][name].copy_(value)

    def load_state_dict(self, state_dict):
        """torch's own gives state the dtype of its parameter."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(numbers, parameters, strict=True):
            if number in state_dict["state"]:
                self.state[p] = {}
                for name, value in state_dict["state"][number].items():
                    self.set_scaled_state(p, name, value.float())

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        """State that is not fp32 is widened, all of it, until the step is over."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            updated = [p for p in group["params"] if self._gradient(p) is not None]
            for p in updated:
                if not self.state[p]:
                    self.initialize_state(p)
            moments = [[self.get_unscaled_state(p, name) for name in ("exp_avg", "exp_avg_sq")] for p in updated]
            for p, (m, v) in zip(updated, moments, strict=True):
                master = self.state[p]["master_param"] if self.master_weights else p
                _update(master, self._gradient(p), m, v, group)
                self.set_scaled_state(p, "exp_avg", m)
                self.set_scaled_state(p, "exp_avg_sq", v)
                if self.master_weights:
                    p.copy_(master)

    def _gradient(self, p):
        return p.decoupled_grad if self.use_decoupled_grad else p.grad


@one_kernel
def _update(p, grad, m, v, group):
    """AdamW of one parameter and its two moments, in place."""
    beta1, beta2 = group["betas"]
    grad = grad.float()
    m.lerp_(grad, 1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = (v / (1 - beta2 ** group["step"])).sqrt_().add_(group["eps"])
    p.mul_(1 - group["lr"] * group["weight_decay"])
    p.addcdiv_(m / (1 - beta1 ** group["step"]), root, value=-group["lr"])


def install_fused_adam() -> None:
    """Where Megatron looks for it, as if it had been there when Megatron was imported."""
    from megatron.core import optimizer, utils
    from megatron.core.optimizer import distrib_optimizer

    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"):
        sys.modules.setdefault(name, ModuleType(name))
    sys.modules["transformer_engine.pytorch.optimizers"].FusedAdam = FusedAdam
    utils._te_version = utils.PkgVersion("2.9.0")
    optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
