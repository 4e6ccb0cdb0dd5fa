"""The page that `flashrl plan` prints, from a model's config.json or a run's configuration."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_flashrl.config import RunConfig
from nemo_flashrl.plan.devices import USABLE, Device, find_device
from nemo_flashrl.plan.fitting import (
    GPUS_OF_A_NODE,
    Change,
    DiskUse,
    changes_that_fit,
    check_layout,
    disk_use,
    largest_context,
    peak,
    smallest_allocation,
    stages,
)
from nemo_flashrl.plan.memory import LAYERS, Layout, StageMemory
from nemo_flashrl.plan.step_time import decode_tokens_per_second, step_time, worker_cores
from nemo_flashrl.weight_sync.hf_config import read_hf_json
from nemo_flashrl.weights.model_shape import FAMILIES, ModelShape, model_shape

GIB = 2**30
CAPACITY = re.compile(r"total capacity of ([\d.]+) GiB")  # in what torch says where memory ran out
LESS = 0.9  # of what is counted for a run that did not fit, though the plan says that it does
DEFAULTS = {
    **{"tp": 1, "pp": 1, "cp": 1, "context": 32768, "batch": 64, "recompute": "none", "precision": "bf16"},
    **{"reference": "none", "head_chunk": None, "device": "H800", "microbatch": 0, "gpus": 0, "sequence": True},
    **{"turns": 20, "ep": 1, "lora_rank": 0, "steps": 100, "save_every": 50, "keep": 2, "exports": 1},
    **{"moments_dtype": "fp32", "gradients_dtype": "fp32", "offload_fraction": 0.0},
    "fp8_param_gather": False,
}


def plan(options: argparse.Namespace) -> int:
    """Print it; returns 0 where the job fits the device, 1 where it does not. ValueError: sizes that cannot be."""
    hf_config, given = _read(options.model, options.overrides)
    shape = model_shape(hf_config)
    asked = {key: value for key, value in vars(options).items() if value is not None}
    if shape.positions is not None:
        given = {"context": min(DEFAULTS["context"], shape.positions)} | given
        if (context := asked.get("context", given["context"])) > shape.positions:
            raise ValueError(
                f"context={context}: the model's max_position_embeddings is {shape.positions}, and `flashrl train` "
                "accepts no more"
            )
    sizes = DEFAULTS | {"lora_targets": LAYERS[:2] if shape.experts else LAYERS} | given | asked
    if not 0 < options.action_share <= 1:
        raise ValueError(f"--action-share {options.action_share:g}: must be above 0, at most 1")
    device = find_device(sizes["device"])
    layout, tokens = layout_of(sizes, distributed_optimizer=not options.plain_optimizer)
    check_layout(shape, layout)
    print("\n".join(_page(shape, layout, device, sizes, tokens, options.action_share)))
    print(f"\n  {disk_line(run_disk(shape, layout, sizes))}")
    return 0 if _fullest(stages(shape, layout, tokens)) <= USABLE * device.memory_gib * GIB else 1


def layout_of(sizes: dict[str, Any], *, distributed_optimizer: bool = True) -> tuple[Layout, int]:
    """The layout that sizes make, and the tokens of its microbatches. ValueError: the GPUs are no whole replicas."""
    model_ranks = sizes["tp"] * sizes["pp"] * sizes["cp"]
    gpus = sizes["gpus"] or model_ranks
    if gpus % model_ranks:
        raise ValueError(
            f"{gpus} GPUs (cluster.nodes x cluster.gpus_per_node, or --gpus): must be a multiple of TP x PP x CP = "
            f"{model_ranks}"
        )
    tokens = sizes["microbatch"] or sizes["context"]
    data = gpus // model_ranks
    layout = Layout(
        tensor=sizes["tp"],
        pipeline=sizes["pp"],
        context=sizes["cp"],
        sequence=sizes["sequence"],
        data=data,
        expert=sizes["ep"],
        lora_rank=sizes["lora_rank"],
        lora_targets=tuple(sizes["lora_targets"]),
        precision=sizes["precision"],
        recompute=sizes["recompute"],
        reference=sizes["reference"],
        distributed_optimizer=distributed_optimizer,
        moments=sizes["moments_dtype"],
        gradients=sizes["gradients_dtype"],
        offload=sizes["offload_fraction"],
        fp8=sizes["fp8_param_gather"],
        head_chunk=sizes["head_chunk"],
        microbatches=max(1, -(-sizes["batch"] * sizes["context"] // (tokens * data))),
    )
    return layout, tokens


def _read(model: str, overrides: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's config.json, and the sizes that a run's configuration gives."""
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if file.suffix == ".json":
        if not file.is_file():
            raise ValueError(f"{model!r} holds no config.json: give a Hugging Face folder or a configuration")
        return read_hf_json(file), {}
    from nemo_flashrl import config as configuration

    run = configuration.load(model, overrides, unneeded=("output", "model.path"))
    source = Path(run.model.path) / "config.json"
    if not run.model.hf_config and not (run.model.path and source.is_file()):
        raise ValueError(f"model.path={run.model.path!r} holds no config.json; model.hf_config may stand for it")
    return run.model.hf_config or read_hf_json(source), sizes_of(run)


def sizes_of(run: RunConfig) -> dict[str, Any]:
    """What a configuration says of the sizes."""
    sizes = {
        **{"tp": run.parallel.tensor, "pp": run.parallel.pipeline, "cp": run.parallel.context},
        **{"context": run.model.context_length, "microbatch": run.batching.max_tokens_per_microbatch},
        **{"batch": run.rollout.batch_size, "recompute": run.model.recompute, "precision": run.model.precision},
        **{"head_chunk": run.model.head_chunk_tokens, "gpus": run.cluster.nodes * run.cluster.gpus_per_node},
        **{"reference": run.reference.mode, "sequence": run.parallel.sequence, "ep": run.parallel.expert},
        **{"lora_rank": run.lora.rank, "lora_targets": run.lora.targets, "keep": run.checkpoint.keep},
        **{name: getattr(run.optimizer, name) for name in ("moments_dtype", "gradients_dtype", "offload_fraction")},
        **{"fp8_param_gather": run.optimizer.fp8_param_gather, "turns": run.rollout.max_turns},
        **{"steps": run.trainer.steps, "save_every": run.checkpoint.every_steps, "exports": _exports(run)},
    }
    return sizes | ({"device": run.cluster.device} if run.cluster.device else {})


def _exports(run: RunConfig) -> int:
    return 2 if run.reference.evaluate and run.reference.mode != "none" else 1


def run_disk(shape: ModelShape, layout: Layout, sizes: dict[str, Any]) -> DiskUse:
    """What a run of these sizes writes; with `save_every` 0 a checkpoint when it is stopped."""
    written = -(-sizes["steps"] // sizes["save_every"]) if sizes["save_every"] else 1
    return disk_use(shape, layout, written=written, keep=sizes["keep"], exports=sizes["exports"])


def disk_line(disk: DiskUse) -> str:
    """For a person; decimal units, as `df -H` and disks have them."""
    many = f"up to {disk.checkpoints} checkpoints" if disk.checkpoints > 1 else "a checkpoint"
    parts = f"{many} of {size(disk.checkpoint)} and {size(disk.export)} of exported weights"
    return f"disk: {parts}, {size(disk.total)} in all, metrics not included"


def size(number: float) -> str:
    """1234567 -> "1.2 MB"."""
    for unit in ("kB", "MB", "GB"):
        number /= 1000
        if number < 1000:
            return f"{number:.1f} {unit}"
    return f"{number / 1000:.1f} TB"


def _fullest(memory: list[StageMemory]) -> int:
    return max(stage.device for stage in memory)


def _page(
    shape: ModelShape, layout: Layout, device: Device, sizes: dict[str, Any], tokens: int, action_share: float
) -> list[str]:
    memory = stages(shape, layout, tokens)
    usable = USABLE * device.memory_gib
    fullest = _fullest(memory) / GIB
    longest = largest_context(shape, layout, device)
    smallest = smallest_allocation(shape, replace(layout, data=1), device, sizes["context"])
    lines = [
        f"{_count(shape.parameters)} parameters on {layout.ranks} x {sizes['device']}: TP {layout.tensor}, PP "
        f"{layout.pipeline}, CP {layout.context}, DP {layout.data}{_experts(layout)}; microbatches of {tokens} tokens, "
        f"recompute {layout.recompute}{_optimizer(layout)}"
        + (f"; LoRA of rank {layout.lora_rank}" if layout.lora_rank else ""),
        "",
        *_memory_table(memory),
        "",
        f"  {'fits' if fullest <= usable else 'DOES NOT FIT'}: the fullest rank holds {fullest:.1f} GiB of {usable:.1f}"
        f" usable ({device.memory_gib:.1f} less {1 - USABLE:.0%} for kernel workspaces and the allocator)",
        f"  largest context, one trajectory per microbatch: {longest} tokens"
        + (" (the model's max_position_embeddings)" if longest == shape.positions else ""),
        f"  fewest GPUs for a context of {sizes['context']}: {_named(smallest)}",
        "",
        *_time_lines(shape, layout, device, sizes, action_share),
        "",
        "  formulas: nemo_flashrl/plan/memory.py and plan/step_time.py, each with its source",
    ]
    return lines


def _optimizer(layout: Layout) -> str:
    smaller = {"moments": layout.moments, "gradients": layout.gradients}
    said = [f"; {name} {dtype}" for name, dtype in smaller.items() if dtype != "fp32"]
    return "".join(said) + (f"; {layout.offload:.0%} of the optimizer on the host" if layout.offload else "")


def _experts(layout: Layout) -> str:
    return f", EP {layout.expert}" if layout.expert > 1 else ""


def _count(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e8 else f"{number / 1e6:.2f}M"


def _memory_table(memory: list[StageMemory]) -> list[str]:
    names = ("weights", "gradients", "optimizer", "activations", "layer", "head")
    lines = ["  GiB per rank" + "".join(f"{name:>13}" for name in (*names, "peak", "on the host"))]
    for stage, held in enumerate(memory):
        values = [*(getattr(held, name) for name in names), held.device, held.host]
        lines.append(f"  stage {stage:<6}" + "".join(f"{value / GIB:>13.2f}" for value in values))
    if saving := max(held.host_save for held in memory):
        first = "more of host memory on the first of the ranks that share an optimizer's state"
        lines.append(f"  while a checkpoint is written: {saving / GIB:.2f} GiB {first}")
        loading = max(held.host_load for held in memory)
        lines.append(f"  while one is read: {loading / GIB:.2f} GiB more of host memory on every rank")
    if any(held.step > held.activations + max(held.layer, held.head - held.recomputed) for held in memory):
        steps = ", ".join(f"{held.step / GIB:.2f}" for held in memory)
        lines.append(f"  the peak is in the optimizer's step, which widens bf16 moments: {steps} GiB, no activations")
    return lines


def _named(layout: Layout | None) -> str:
    if layout is None:
        return "none found up to PP 16 and CP 8; larger sizes may fit"
    nodes = -(-layout.ranks // GPUS_OF_A_NODE)
    return (
        f"{layout.ranks} ({nodes} node{'s' * (nodes > 1)}): TP {layout.tensor}, PP {layout.pipeline}, CP "
        f"{layout.context}{f', DP {layout.data}' * (layout.data > 1)}{_experts(layout)}, recompute {layout.recompute}"
    )


def _time_lines(
    shape: ModelShape, layout: Layout, device: Device, sizes: dict[str, Any], action_share: float
) -> list[str]:
    tokens = float(sizes["batch"] * sizes["context"])
    time = step_time(shape, layout, device, tokens=tokens, trajectory_tokens=sizes["context"])
    parts = {"trunk": time.trunk, "attention": time.attention, "recomputation": time.recompute, "head": time.head}
    shares = ", ".join(f"{name} {value / time.total:.0%}" for name, value in parts.items())
    tensor = next(t for t in (1, 2, 4, 8, 16) if 2 * shape.parameters < 0.7 * device.memory_gib * GIB * t or t == 16)
    speed, episodes = decode_tokens_per_second(shape, device, context_tokens=sizes["context"], tensor=tensor)
    needed = tokens * action_share / time.seconds / speed
    turns = sizes["batch"] * sizes["turns"] / time.seconds
    cores = worker_cores(turns)
    return [
        f"  a step of {sizes['batch']} trajectories of {sizes['context']} tokens: {time.total / 1e15:.0f} PFLOP, about "
        f"{time.seconds:.0f} s at 40% of peak ({shares})",
        f"  rollouts: about {speed:.0f} tokens/s per GPU ({episodes} episodes on TP {tensor}); {needed:.1f} GPUs "
        f"keep up with the trainer at {action_share:.0%} action tokens, tool time not included",
        f"  rollout workers: {turns:.0f} turns/s at {sizes['turns']} turns a trajectory; cores that keep up: "
        f"{math.ceil(cores)}, environments not included",
    ]


def what_would_have_fitted(run: RunConfig, gpus: int, said: str) -> str:
    """One sentence for a run on `gpus` GPUs that ran out of their memory, in torch's words `said`.

    Empty where the model or its GPUs are not known.
    """
    with contextlib.suppress(ValueError):  # of a record that the plan cannot read, or of processes that are none of it
        return _what_would_have_fitted(run, gpus, said)
    return ""


def _what_would_have_fitted(run: RunConfig, gpus: int, said: str) -> str:
    config = run.model.hf_config
    if not config and (file := Path(run.model.path) / "config.json").is_file():
        config = read_hf_json(file)
    capacity = float(found[1]) if (found := CAPACITY.search(said)) else None
    if config.get("model_type") not in FAMILIES or not (capacity or run.cluster.device):
        return ""
    shape, sizes = model_shape(config), DEFAULTS | sizes_of(run) | {"gpus": gpus}
    longest = sizes["context"]
    layout, tokens = layout_of(sizes | {"microbatch": max(sizes["microbatch"], longest)})
    device = replace(find_device(run.cluster.device or "H800"), **({"memory_gib": capacity} if capacity else {}))
    usable, own = USABLE * device.memory_gib * GIB, peak(shape, layout, tokens)
    limit = usable if own > usable else LESS * own
    counted = f"`flashrl plan` counts {own / GIB:.1f} GiB for this run, of {usable / GIB:.1f} usable on a GPU; "
    whole = run.value_head.learning_rate > 0 or "yarn" in (config.get("rope_scaling") or {}).values()
    fixed = (["context"] if whole else []) + (["offload"] if run.optimizer.fp8_param_gather else [])
    changes = changes_that_fit(shape, layout, tokens, limit, longest=longest, fixed=fixed)
    if changes:
        return f"{counted}what would have fitted: {', '.join(map(_changed, changes))}"
    within = replace(device, memory_gib=limit / USABLE / GIB)
    smallest = smallest_allocation(shape, replace(layout, data=1), within, longest)
    nothing = f"no settings fit {longest} tokens on {gpus} of them"
    return f"{counted}{nothing}; fewest GPUs that would have: {_named(smallest)}"


def _changed(change: Change) -> str:
    host = f", {change.host / GIB:.1f} of the host" if "offload" in change.settings else ""
    return f"{change.settings} ({change.peak / GIB:.1f} GiB{host})"
