"""Live shards -> a stream of Hugging Face names and tensors, one parameter at a time, at any TP x PP.

Every rank of the first data-parallel replica walks the stream; tensors come out on global rank 0 alone. At any moment
at most one whole parameter and its shards are held beside the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel as MegatronGPTModel
from torch import Tensor

from nemo_flashrl import platform
from nemo_flashrl.weights.mapping import Layout, find_rule

Named = tuple[str, Tensor]


def unwrap(module: torch.nn.Module) -> MegatronGPTModel:
    """Megatron's model under NeMo's, the data-parallel and the precision wrappers."""
    while not isinstance(module, MegatronGPTModel):
        module = module.module
    return module


def local_parameters(model: MegatronGPTModel) -> Iterator[tuple[str, int, Tensor]]:
    """(name, global layer number or -1, parameter) of this rank's shard, in the model's order."""
    for name, parameter in model.named_parameters():
        match = re.match(r"decoder\.layers\.(\d+)\.", name)
        layer = model.decoder.layers[int(match[1])].layer_number - 1 if match else -1
        yield name, layer, parameter


def stream_hf_tensors(
    model: MegatronGPTModel, vocab_size: int, value: Callable[[Tensor], Tensor] = Tensor.detach
) -> Iterator[Named]:
    """Yield (Hugging Face name, tensor) on global rank 0; the other ranks take part and yield nothing.

    A collective: every rank must exhaust it. The tensor is a view or a copy that the next step may overwrite. Tied
    models yield no lm_head. `value` says what of each parameter travels: itself, or what is kept in its shape, like
    its gradient. ValueError for a parameter that no rule maps.
    """
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) != 0:
        return
    layout = Layout.of(model.config, vocab_size)
    for stage in range(parallel_state.get_pipeline_model_parallel_world_size()):
        yield from _stream_stage(model, layout, stage, value)


def _stream_stage(
    model: MegatronGPTModel, layout: Layout, stage: int, value: Callable[[Tensor], Tensor]
) -> Iterator[Named]:
    here = parallel_state.get_pipeline_model_parallel_rank() == stage
    own = list(local_parameters(model)) if here else []
    table = _from_stage([(name, layer) for name, layer, _ in own], stage)
    for index, (name, layer) in enumerate(table):
        rule = find_rule(name)
        if name == "output_layer.weight" and layout.tied:
            continue
        tensors: tuple[Tensor, ...] = ()
        if here:
            parameter = value(own[index][2])
            tensors = rule.to_hf(_gather_shards(parameter) if rule.sharded else [parameter], layout)
        for hf_name, tensor in zip(
            rule.hf_names(name, layer), _to_first_rank(tensors, len(rule.hf), stage), strict=True
        ):
            if tensor is not None:
                yield hf_name, tensor


def _gather_shards(parameter: Tensor) -> list[Tensor]:
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return [parameter]
    shards = [torch.empty_like(parameter) for _ in range(group.size())]
    torch.distributed.all_gather(shards, parameter.contiguous(), group=group)
    return shards


def _from_stage(value: list, stage: int) -> list:
    """What a stage knows, told to all stages; the pipeline group of each tensor rank speaks for itself."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, src=torch.distributed.get_global_rank(group, stage), group=group)
    return box[0]


def _to_first_rank(tensors: tuple[Tensor, ...], count: int, stage: int) -> list[Tensor | None]:
    """Whole tensors of a stage, on global rank 0; None elsewhere."""
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        return [None] * count
    first = parallel_state.get_pipeline_model_parallel_rank() == 0
    if stage == 0:
        return list(tensors) if first else [None] * count
    group = parallel_state.get_pipeline_model_parallel_group()
    here = parallel_state.get_pipeline_model_parallel_rank() == stage
    received: list[Tensor | None] = [None] * count
    shapes = _from_stage([(tuple(t.shape), t.dtype) for t in tensors], stage)
    for index, (shape, dtype) in enumerate(shapes):
        if here:
            torch.distributed.send(tensors[index].contiguous(), group_dst=0, group=group)
        elif first:
            received[index] = torch.empty(shape, dtype=dtype, device=platform.device())
            torch.distributed.recv(received[index], group_src=stage, group=group)
    return received
