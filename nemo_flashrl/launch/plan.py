"""`flashrl plan`: what fits, the largest context, the smallest allocation; pure arithmetic over the plan_* files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nemo_flashrl.launch.plan_devices import USABLE, Device
from nemo_flashrl.launch.plan_memory import Layout, StageMemory, stage_memory
from nemo_flashrl.launch.plan_model import ModelShape

GPUS_OF_A_NODE = 8
CONTEXT_STEP = 1024


def check_layout(shape: ModelShape, layout: Layout) -> None:
    """Refuse sizes that Megatron cannot run: one line, what and why."""
    for name, value in (("tensor", layout.tensor), ("pipeline", layout.pipeline), ("context", layout.context)):
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    for name, value in (("attention heads", shape.heads), ("key/value heads", shape.groups)):
        if value % layout.tensor:
            raise ValueError(f"tensor={layout.tensor}: does not divide the model's {value} {name}")
    if shape.layers % layout.pipeline:
        raise ValueError(f"pipeline={layout.pipeline}: does not divide the model's {shape.layers} layers")


def stages(shape: ModelShape, layout: Layout, tokens: int) -> list[StageMemory]:
    """Memory of one rank of every pipeline stage."""
    return [stage_memory(shape, layout, stage, tokens) for stage in range(layout.pipeline)]


def fits(shape: ModelShape, layout: Layout, device: Device, tokens: int) -> bool:
    """Whether the fullest stage stays within the usable share of the device."""
    return max(s.device for s in stages(shape, layout, tokens)) <= USABLE * device.memory_gib * 2**30


def largest_context(shape: ModelShape, layout: Layout, device: Device, limit: int = 2**22) -> int:
    """The longest trajectory, alone in its microbatch, in whole 1024 tokens; 0 where not even that fits."""
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

    Searched: tensor up to 8 (a node), context up to 8, pipeline, recomputation none or full. Of equal GPUs the
    one without recomputation, then with the shorter pipeline, then with less tensor parallelism.
    """
    found = [layout for layout in _candidates(shape, wish) if fits(shape, layout, device, tokens)]
    return min(
        found,
        key=lambda a: (a.ranks, a.recompute == "full", a.pipeline, a.tensor),
        default=None,
    )


def _candidates(shape: ModelShape, wish: Layout) -> Iterator[Layout]:
    powers = (1, 2, 4, 8)
    for tensor in powers:
        if shape.heads % tensor or shape.groups % tensor:
            continue
        for pipeline in (1, 2, 4, 8, 16):
            if shape.layers % pipeline:
                continue
            for context in powers:
                for recompute in ("none", "full"):
                    yield replace(wish, tensor=tensor, pipeline=pipeline, context=context, data=1, recompute=recompute)
