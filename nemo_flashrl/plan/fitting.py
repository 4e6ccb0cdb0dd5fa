"""`flashrl plan`: what fits, the largest context, the smallest allocation, the disk; arithmetic over this room."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from nemo_flashrl.plan.devices import USABLE, Device
from nemo_flashrl.plan.memory import FLOAT, Layout, StageMemory, head_chunk_tokens, stage_memory
from nemo_flashrl.weights.model_shape import ModelShape

GPUS_OF_A_NODE = 8
CONTEXT_STEP = 1024
SMALL_HEAD_CHUNK = 256  # tokens
SETTINGS = {  # what a field of `Layout`, or the tokens of a microbatch, is in a configuration
    "tokens": "batching.max_tokens_per_microbatch",
    "recompute": "model.recompute",
    "head_chunk": "model.head_chunk_tokens",
    "tensor": "parallel.tensor",
    "pipeline": "parallel.pipeline",
    "context": "parallel.context",
    "gradients": "optimizer.gradients_dtype",
    "moments": "optimizer.moments_dtype",
    "offload": "optimizer.offload_fraction",
}


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
    _check_optimizer(layout)
    if shape.experts and layout.lora_rank and {"linear_fc1", "linear_fc2"} & set(layout.lora_targets):
        raise ValueError("lora.targets: experts take no adapters, so linear_fc1 and linear_fc2 cannot be targets")


def _check_optimizer(layout: Layout) -> None:
    if not 0 <= layout.offload <= 1:
        raise ValueError(f"offload_fraction={layout.offload:g}: must be at least 0, at most 1")
    smaller = {"moments_dtype": layout.moments, "gradients_dtype": layout.gradients, "offload_fraction": layout.offload}
    asked = [f"{name}={value}" for name, value in smaller.items() if value not in ("fp32", 0)]
    asked += ["fp8_param_gather=True"] * layout.fp8
    if asked and layout.precision != "bf16":
        raise ValueError(f"{asked[0]}: needs precision bf16, not {layout.precision}")
    if asked and not layout.distributed_optimizer:
        raise ValueError(f"{asked[0]}: needs the distributed optimizer; leave --plain-optimizer out")
    if layout.fp8 and (layout.offload or layout.lora_rank or layout.reference != "none"):
        raise ValueError("fp8_param_gather=True: goes with no offload_fraction, no LoRA and no reference; set false")
    if layout.offload and layout.moments == "bf16":
        raise ValueError("moments_dtype=bf16: an offloaded optimizer keeps fp32 moments; give one of the two")


def _holds_experts(shape: ModelShape, layout: Layout) -> bool:
    ranks = layout.ranks // layout.pipeline
    return shape.experts > 0 and shape.experts % layout.expert == 0 == ranks % layout.expert


def stages(shape: ModelShape, layout: Layout, tokens: int) -> list[StageMemory]:
    """Memory of one rank of every pipeline stage."""
    return [stage_memory(shape, layout, stage, tokens) for stage in range(layout.pipeline)]


def peak(shape: ModelShape, layout: Layout, tokens: int) -> int:
    """Bytes of the fullest stage."""
    return max(stage.device for stage in stages(shape, layout, tokens))


def fits(shape: ModelShape, layout: Layout, device: Device, tokens: int) -> bool:
    """Whether the fullest stage stays within the usable share of the device."""
    return peak(shape, layout, tokens) <= USABLE * device.memory_gib * 2**30


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


@dataclass(frozen=True, slots=True)
class Change:
    """Overrides of a configuration, and the fullest rank's bytes with them and with all changes before."""

    settings: str
    peak: int
    host: int  # bytes of host memory of a rank


def changes_that_fit(
    shape: ModelShape, layout: Layout, tokens: int, limit: float, *, longest: int, fixed: Collection[str] = ()
) -> list[Change]:
    """The first changes on the same GPUs after which the fullest rank holds at most `limit` bytes; none do: [].

    They are tried in the order of docs/tuning.md and kept where they help; what the later ones make needless is left
    out again.

    Args:
        longest: tokens of a trajectory; no microbatch can hold fewer.
        fixed: keys of `SETTINGS` that the run cannot change.
    """
    kept: dict[str, Any] = {}
    least = peak(shape, layout, tokens)
    for change in _cheapest_first(shape, layout, tokens, longest):
        changed = _with(shape, layout, tokens, kept | change) if change.keys().isdisjoint(fixed) else None
        if changed is None or peak(shape, *changed) >= least:
            continue
        kept |= change
        least = peak(shape, *changed)
        if least <= limit:
            break
    else:
        return []
    for name in reversed(list(kept)):
        fewer = {other: value for other, value in kept.items() if other != name}
        without = _with(shape, layout, tokens, fewer)
        if without is not None and peak(shape, *without) <= limit:
            kept = fewer
    found = []
    for count, name in enumerate(kept, 1):
        sizes = _with(shape, layout, tokens, dict(list(kept.items())[:count]))
        more = " parallel.sequence=true" if name == "tensor" else ""
        if sizes is not None and kept[name] != getattr(layout, name, None):
            host = max(stage.host for stage in stages(shape, *sizes))
            found.append(Change(f"{SETTINGS[name]}={kept[name]}{more}", peak(shape, *sizes), host))
    return found


def _cheapest_first(shape: ModelShape, layout: Layout, tokens: int, longest: int) -> Iterator[dict[str, Any]]:
    if tokens > longest:
        yield {"tokens": longest}
    yield {"recompute": "full"}
    if head_chunk_tokens(shape, layout) > SMALL_HEAD_CHUNK:
        yield {"head_chunk": SMALL_HEAD_CHUNK}
    for name in ("tensor", "pipeline", "context"):
        yield from ({name: size} for size in (2, 4, 8) if size > getattr(layout, name))
    yield {"gradients": "bf16"}
    yield {"moments": "bf16"}
    yield {"moments": "fp32", "offload": 1}


def _with(shape: ModelShape, layout: Layout, tokens: int, changes: dict[str, Any]) -> tuple[Layout, int] | None:
    """The changed layout on as many GPUs, and its microbatches' tokens; None where it cannot be."""
    fields = dict(changes)
    fewer = fields.pop("tokens", tokens)
    changed = replace(layout, **fields, sequence=layout.sequence or "tensor" in fields)
    data, rest = divmod(layout.ranks, changed.ranks // changed.data)
    if rest or not data:
        return None
    microbatches = -(-layout.microbatches * layout.data * tokens // (data * fewer))
    changed = replace(changed, data=data, microbatches=microbatches)
    try:
        check_layout(shape, changed)
    except ValueError:
        return None
    return changed, fewer


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Bytes that a run leaves in its folder, beside metrics and samples."""

    checkpoint: int  # one of them
    checkpoints: int  # how many there are at most: an old one goes when a newer one is complete
    export: int  # the policy as a Hugging Face folder, and the reference where it is exported too

    @property
    def total(self) -> int:
        return self.checkpoints * self.checkpoint + self.export


def disk_use(shape: ModelShape, layout: Layout, *, written: int, keep: int, exports: int = 1) -> DiskUse:
    """What a run of `written` checkpoints writes, of which it keeps `keep`, and so many exports.

    checkpoint  of each parameter, padded vocabulary rows included: e bytes, of a trained one 8 more for Adam's moments
                and 4 for the fp32 weights of a bf16 model, and 4 for a reference
    export      e bytes a parameter as published
    """
    count = replace(shape, vocab=shape.padded_vocab(layout.vocab_divisible_by, layout.tensor)).parameters
    adapters = shape.adapter_parameters(layout.lora_targets, layout.lora_rank)
    trained = adapters if layout.lora_rank else count
    per_trained = 8 + (FLOAT if layout.precision == "bf16" else 0)
    reference = 0 if layout.reference == "none" else FLOAT
    return DiskUse(
        checkpoint=(count + adapters) * (layout.element + reference) + trained * per_trained,
        checkpoints=min(written, keep + 1),
        export=exports * shape.parameters * layout.element,
    )
