"""`flashrl plan`: what fits, the largest context, the smallest allocation; pure arithmetic over the plan_* files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from nemo_flashrl.plan.devices import USABLE, Device
from nemo_flashrl.plan.memory import Layout, StageMemory, stage_memory
from nemo_flashrl.weights.model_shape import ModelShape

GPUS_OF_A_NODE = 8
CONTEXT_STEP = 1024


def check_layout(shape: ModelShape, layout: Layout) -> None:
    """Refuse sizes that Megatron cannot run: one line, what and why."""
    for name in ("tensor", "pipeline", "context", "expert"):
        if getattr(layout, name) < 1:
            raise ValueError(f"{name}={getattr(layout, name)}: must be at least 1")
    for name, value in (("attention heads", shape.heads), ("key/value heads", shape.groups)):
        if value % layout.tensor:
            raise ValueError(f"tensor={layout.tensor}: does not divide the model's {value} {name}")
    if shape.layers % layout.pipeline:
        raise ValueError(f"pipeline={layout.pipeline}: does not divide the model's {shape.layers} layers")
    if layout.expert > 1 and not _holds_experts(shape, layout):
        raise ValueError(
            f"expert={layout.expert}: must divide the model's experts ({shape.experts} a layer) and the "
            f"{layout.ranks // layout.pipeline} ranks of a pipeline stage"
        )
    if shape.experts and layout.lora_rank and {"linear_fc1", "linear_fc2"} & set(layout.lora_targets):
        raise ValueError("lora.targets: experts take no adapters, so linear_fc1 and linear_fc2 cannot be targets")


def _holds_experts(shape: ModelShape, layout: Layout) -> bool:
    ranks = layout.ranks // layout.pipeline
    return shape.experts > 0 and shape.experts % layout.expert == 0 == ranks % layout.expert


def stages(shape: ModelShape, layout: Layout, tokens: int) -> list[StageMemory]:
    """Memory of one rank of every pipeline stage."""
    return [stage_memory(shape, layout, stage, tokens) for stage in range(layout.pipeline)]


def fits(shape: ModelShape, layout: Layout, device: Device, tokens: int) -> bool:
    """Whether the fullest stage stays within the usable share of the device."""
    return max(s.device for s in stages(shape, layout, tokens)) <= USABLE * device.memory_gib * 2**30


def largest_context(shape: ModelShape, layout: Layout, device: Device, limit: int = 2**22) -> int:
    """The longest trajectory, alone in its microbatch: what the model's positions allow, or where less fits, that in
    whole 1024 tokens; 0 where not even that fits.
    """
    if shape.positions is not None and shape.positions <= limit:
        limit = shape.positions
        if fits(shape, layout, device, limit):
            return limit
    low, high = 0, limit // CONTEXT_STEP
    while low < high:
        middle = (low + high + 1) // 2
        if fits(shape, layout, device, middle * CONTEXT_STEP):
            low = middle
        else:
            high = middle - 1
    return low * CONTEXT_STEP


def smallest_allocation(shape: ModelShape, wish: Layout, device: Device, tokens: int) -> Layout | None:
    """The fewest GPUs on which microbatches of `tokens` fit, `wish` giving all that is not searched; None: none does.

    Searched: tensor up to 8 (a node), context up to 8, pipeline, recomputation none or full; for a model with experts
    also data up to 8, and experts spread over none or all ranks of a stage. Of equal GPUs the one without
    recomputation, then with the shorter pipeline, then with less tensor parallelism.
    """
    found = [layout for layout in _candidates(shape, wish) if fits(shape, layout, device, tokens)]
    return min(
        found,
        key=lambda a: (a.ranks, a.recompute == "full", a.pipeline, a.tensor),
        default=None,
    )


def _candidates(shape: ModelShape, wish: Layout) -> Iterator[Layout]:
    powers = (1, 2, 4, 8)
    tensors = [tensor for tensor in powers if not (shape.heads % tensor or shape.groups % tensor)]
    pipelines = [pipeline for pipeline in (1, 2, 4, 8, 16) if not shape.layers % pipeline]
    copies = powers if shape.experts else (1,)
    for sizes in product(tensors, pipelines, powers, copies, ("none", "full")):
        names = ("tensor", "pipeline", "context", "data", "recompute")
        layout = replace(wish, **dict(zip(names, sizes, strict=True)), expert=1)
        spread = replace(layout, expert=layout.ranks // layout.pipeline)
        yield layout
        if spread.expert > 1 and _holds_experts(shape, spread):
            yield spread
