"""Live shards -> a stream of Hugging Face names and tensors, one parameter at a time, at any TP x PP x EP.

The ranks that hold the first replica of a parameter walk the stream: data-parallel rank 0 of the dense layers, expert-
data-parallel rank 0 of the experts. Tensors come out on global rank 0 alone. At any moment at most one whole parameter
and its shards are held beside the model; of experts, one of every expert-parallel rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel as MegatronGPTModel
from torch import Tensor

from nemo_flashrl import platform
from nemo_flashrl.weights.lora import merged, without_wrapper
from nemo_flashrl.weights.mapping import Rule, RuleSizes, find_rule

Named = tuple[str, Tensor]
Model = MegatronGPTModel | Sequence[MegatronGPTModel]  # the chunks of a virtual pipeline, in order


def unwrap(module: torch.nn.Module) -> MegatronGPTModel:
    """Megatron's model under NeMo's, the data-parallel and the precision wrappers."""
    while not isinstance(module, MegatronGPTModel):
        module = module.module
    return module


def local_parameters(model: Model) -> Iterator[tuple[str, int, Tensor]]:
    """(name, global layer number or -1, parameter) of this rank's shard, in the model's order; adapters left out."""
    for chunk in chunks_of(model):
        for name, parameter in chunk.named_parameters():
            match = re.match(r"decoder\.layers\.(\d+)\.", name)
            layer = chunk.decoder.layers[int(match[1])].layer_number - 1 if match else -1
            if ".adapter." not in name:
                yield without_wrapper(name), layer, parameter


def chunks_of(model: Model) -> Sequence[MegatronGPTModel]:
    """One without a virtual pipeline."""
    return [model] if isinstance(model, torch.nn.Module) else model


def stream_hf_tensors(
    model: Model, vocab_size: int, value: Callable[[Tensor], Tensor] | None = None
) -> Iterator[Named]:
    """Yield (Hugging Face name, tensor) on global rank 0; the other ranks take part and yield nothing.

    A collective: every rank must exhaust it. The tensor is a view or a copy that the next step may overwrite. Tied
    models yield no lm_head. `value` says what of each parameter travels, itself merged with its adapter or what is kept
    in its shape, like its gradient. ValueError for a parameter that no rule maps.
    """
    dense = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    experts = parallel_state.get_expert_data_parallel_rank() == 0
    if not (dense or experts):
        return
    layout = RuleSizes.of(chunks_of(model)[0].config, vocab_size)
    value = value or merged(chunks_of(model))
    for stage in range(parallel_state.get_pipeline_model_parallel_world_size()):
        here = parallel_state.get_pipeline_model_parallel_rank() == stage
        own = list(local_parameters(model)) if here else []
        for index, (name, layer) in enumerate(from_stage([(name, layer) for name, layer, _ in own], stage)):
            rule = find_rule(name)
            skipped = name == "output_layer.weight" and layout.tied
            if skipped or not (experts if rule.of_expert else dense):
                continue
            yield from _whole_tensors(  # no name for the shards here: the next are gathered when these are gone
                rule, name, layer, layout, _gather_shards(value(own[index][2]), rule) if here else [], stage
            )


def _whole_tensors(
    rule: Rule, name: str, layer: int, layout: RuleSizes, shards: list[Tensor], stage: int
) -> Iterator[Named]:
    """What one parameter of a stage is to Hugging Face; an expert's name stands for one of every expert rank."""
    ranks = parallel_state.get_expert_model_parallel_world_size() if rule.of_expert else 1
    per_rank = len(shards) // ranks
    for rank in range(ranks):
        tensors = rule.to_hf(shards[rank * per_rank : (rank + 1) * per_rank], layout) if shards else ()
        names = rule.hf_names(name, layer, layout, rank * layout.num_experts // ranks)
        for hf_name, tensor in zip(names, to_first_rank(tensors, len(names), stage), strict=True):
            if tensor is not None:
                yield hf_name, tensor


def _gather_shards(parameter: Tensor, rule: Rule) -> list[Tensor]:
    """All shards of a parameter, in rank order; of an expert, the tensor ranks of each expert rank in turn."""
    if rule.of_expert:
        group = parallel_state.get_expert_tensor_and_model_parallel_group()
    elif rule.sharded:
        group = parallel_state.get_tensor_model_parallel_group()
    else:
        return [parameter]
    if group.size() == 1:
        return [parameter]
    # One buffer for all: from a list, the backend would take as much again.
    shards = parameter.new_empty(group.size() * parameter.shape[0], *parameter.shape[1:])
    torch.distributed.all_gather_into_tensor(shards, parameter.contiguous(), group=group)
    return list(shards.chunk(group.size()))


def from_stage(value: list, stage: int) -> list:
    """What a stage knows, told to all stages; the pipeline group of each tensor rank speaks for itself."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, src=torch.distributed.get_global_rank(group, stage), group=group)
    return box[0]


def to_first_rank(tensors: tuple[Tensor, ...], count: int, stage: int) -> list[Tensor | None]:
    """Whole tensors of a stage, on global rank 0; None elsewhere."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if torch.distributed.get_global_rank(group, 0) != 0:
        return [None] * count
    first = parallel_state.get_pipeline_model_parallel_rank() == 0
    if stage == 0:
        return list(tensors) if first else [None] * count
    here = parallel_state.get_pipeline_model_parallel_rank() == stage
    received: list[Tensor | None] = [None] * count
    shapes = from_stage([(tuple(t.shape), t.dtype) for t in tensors], stage)
    for index, (shape, dtype) in enumerate(shapes):
        if here:
            torch.distributed.send(tensors[index].contiguous(), group_dst=0, group=group)
        elif first:
            received[index] = torch.empty(shape, dtype=dtype, device=platform.device())
            torch.distributed.recv(received[index], group_src=stage, group=group)
    return received
