"""Live LoRA adapters -> PEFT's names, whole, at any TP x PP: for an export, and for servers that take an adapter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel as MegatronGPTModel
from nemo.collections.llm.peft.lora import LoRALinear
from torch import Tensor

from nemo_flashrl.weight_sync.hf_writer import new_folder, write_peft
from nemo_flashrl.weights.lora import adapters, tensor_shards
from nemo_flashrl.weights.mapping import Rule, RuleSizes, find_rule
from nemo_flashrl.weights.shards import Named, from_stage, to_first_rank


def stream_adapter(model: MegatronGPTModel, *, scaled: bool = False) -> Iterator[Named]:
    """Yield (PEFT's name, factor) on global rank 0; a collective, as `shards.stream_hf_tensors` is.

    One factor down [rank, inputs] serves all of Hugging Face's layers that Megatron keeps as one, so it comes once for
    each, before its factor up [outputs, rank]. `scaled` ones have alpha / rank in the latter.
    """
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) != 0:
        return
    layout = RuleSizes.of(model.config, 0)
    for stage in range(parallel_state.get_pipeline_model_parallel_world_size()):
        here = parallel_state.get_pipeline_model_parallel_rank() == stage
        own = adapters(model) if here else {}
        wrappers = list(own.values())
        for index, (name, layer) in enumerate(from_stage([(n, _global_layer(model, n)) for n in own], stage)):
            rule = find_rule(f"{name}.weight")
            modules = [n.removesuffix(".weight") for n in rule.hf_names(f"{name}.weight", layer, layout)]
            names = [f"base_model.model.{module}.lora_{side}.weight" for module in modules for side in "AB"]
            factors = _whole_factors(wrappers[index], rule, layout, scaled) if here else ()
            for hf_name, factor in zip(names, to_first_rank(factors, len(names), stage), strict=True):
                if factor is not None:
                    yield hf_name, factor


def _global_layer(model: MegatronGPTModel, name: str) -> int:
    return model.get_submodule(".".join(name.split(".")[:3])).layer_number - 1


def _whole_factors(wrapper: LoRALinear, rule: Rule, layout: RuleSizes, scaled: bool) -> tuple[Tensor, ...]:
    """(down, up) for each of Hugging Face's layers in turn; a row-parallel layer's factor down is cut along inputs."""
    adapter = wrapper.adapter
    downs, ups = (tensor_shards(part.weight.detach()) for part in (adapter.linear_in, adapter.linear_out))
    down = torch.cat(downs, dim=1 if adapter.input_is_parallel else 0)
    whole = (torch.cat(ups),) if adapter.input_is_parallel else rule.to_hf(ups, layout)
    return tuple(f for up in whole for f in (down, up * (adapter.alpha / adapter.dim) if scaled else up))


def write_adapter(model: MegatronGPTModel, base: str, target: str | Path) -> None:
    """Write the adapters of a model that this process holds whole as a PEFT folder for the model `base`.

    Raises:
        ValueError: the target exists or cannot be written, or a factor holds NaN or inf.
    """
    factors = {name: factor.clone() for name, factor in stream_adapter(model)}
    alpha = next(iter(adapters(model).values())).adapter.alpha
    with new_folder(target) as folder:
        write_peft(factors, folder, alpha=alpha, base=base)
