"""LoRA (Hu et al. 2021) with NeMo's own adapters: the base is frozen, two low-rank factors beside a layer are trained.

NeMo's LoRA is a trainer callback that holds back the set-up of optimizer and checkpoints and saves the adapters alone.
Here adapters are part of the model from the start, so a checkpoint holds base and adapters, and reference policy, refit
and resume need to know nothing of it. A layer's names in a checkpoint are those that it has without an adapter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.models.gpt import GPTModel as MegatronGPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from nemo.collections.llm.peft.lora import LoRALinear
from nemo.collections.llm.peft.utils import ParallelLinearAdapter, get_adapter_attributes_from_linear
from torch import Tensor

TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
WRAPPED = "to_wrap."  # what NeMo's wrapper puts before the name of a layer's own parameter


@dataclass(frozen=True)
class LoraSettings:
    """Megatron's names of the layers, which hold several of Hugging Face's each."""

    rank: int
    alpha: float = 32.0
    targets: Sequence[str] = TARGETS


def add_lora(model: MegatronGPTModel, settings: LoraSettings) -> None:
    """Freeze `model` and put adapters beside its target layers, in place; they start as zero.

    Raises:
        ValueError: a target of which the model has none outside its experts.
    """
    model.requires_grad_(False)
    for target in settings.targets:
        pattern = rf"decoder\.layers\.\d+\.\w+\.{target}"
        names = [name for name, _ in model.named_modules() if re.fullmatch(pattern, name)]
        if not names:
            raise ValueError(f"lora.targets: the model has no {target} outside its experts, whose layers take none")
        for name in names:
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, target, _with_adapter(getattr(parent, target), name, settings))
    if model.pre_process:  # recomputed layers have gradients only if what goes into them has
        model.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())


def _with_adapter(layer: torch.nn.Module, name: str, settings: LoraSettings) -> LoRALinear:
    is_parallel, inputs, outputs, no_gather, base_is_parallel = _attributes(layer)
    adapter = ParallelLinearAdapter(
        inputs,
        outputs,
        settings.rank,
        base_linear_name=name,
        activation="identity",
        input_is_parallel=is_parallel,
        model_parallel_config=layer.config,
        alpha=settings.alpha,
        disable_sequence_parallel_comm=no_gather,
        base_linear_is_parallel=base_is_parallel,
    )
    wrapper = LoRALinear(layer, adapter.to(layer.weight.dtype))
    wrapper.register_load_state_dict_pre_hook(_own_names)
    return wrapper


def _attributes(layer: torch.nn.Module) -> tuple[bool, int, int, bool, bool]:
    """As NeMo 2.7's function, which without Transformer Engine takes a None for a class and raises TypeError."""
    if not isinstance(layer, ColumnParallelLinear | RowParallelLinear):
        is_parallel, inputs, outputs, no_gather, base_is_parallel = get_adapter_attributes_from_linear(layer)
        if getattr(layer, "return_layernorm_output_gathered", False):
            # Its backward pass leaves out the gradient of a norm's output that it returns gathered (Transformer Engine
            # 2.5 to 2.16, module/layernorm_linear.py): the adapter gathers what is returned as it is.
            layer.return_layernorm_output_gathered = no_gather = False
        return is_parallel, inputs, outputs, no_gather, base_is_parallel
    is_row = isinstance(layer, RowParallelLinear)
    return is_row, layer.input_size, layer.output_size, not layer.config.sequence_parallel, True


def _own_names(module: LoRALinear, state_dict: dict, prefix: str, *_) -> None:
    """NeMo's wrapper saves the layer under the name that it has without an adapter, and cannot load it from there."""
    for name in list(module.to_wrap.state_dict()):
        if prefix + name in state_dict:
            state_dict[prefix + WRAPPED + name] = state_dict.pop(prefix + name)


def without_wrapper(name: str) -> str:
    """A parameter's name in the model without LoRA."""
    return name.replace(f".{WRAPPED}", ".")


def adapters(model: torch.nn.Module) -> dict[str, LoRALinear]:
    """Name of a layer -> its wrapper; empty without LoRA."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def merged(models: Sequence[torch.nn.Module]) -> Callable[[Tensor], Tensor]:
    """What a parameter counts for in inference: itself, or with its adapter's product added in fp32.

    For a layer with an adapter the answer is a collective of the tensor-parallel group.
    """
    wrappers = {id(wrapper.to_wrap.weight): wrapper for model in models for wrapper in adapters(model).values()}

    @torch.no_grad()
    def value(parameter: Tensor) -> Tensor:
        wrapper = wrappers.get(id(parameter))
        if wrapper is None:
            return parameter.dequantize() if is_float8tensor(parameter) else parameter.detach()
        down, up = factors(wrapper)
        return (parameter.float() + up @ down).to(parameter.dtype)

    return value


def factors(wrapper: LoRALinear) -> tuple[Tensor, Tensor]:
    """(down [rank, inputs], up [outputs, rank]) in fp32, scaled, for this rank's shard of the layer's weight."""
    adapter = wrapper.adapter
    down, up = adapter.linear_in.weight.detach(), adapter.linear_out.weight.detach()
    if adapter.input_is_parallel:  # a row-parallel layer has all outputs
        up = torch.cat(tensor_shards(up))
    else:
        down = torch.cat(tensor_shards(down))
    return down.float(), up.float() * (adapter.alpha / adapter.dim)


def tensor_shards(own: Tensor) -> list[Tensor]:
    """What all tensor-parallel ranks have of a factor, in rank order; a collective of them."""
    group = parallel_state.get_tensor_model_parallel_group()
    shards = [torch.empty_like(own) for _ in range(group.size())]
    torch.distributed.all_gather(shards, own.contiguous(), group=group)
    return shards
