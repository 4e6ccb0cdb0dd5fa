"""Scale on paper: 8B to 405B on 8 to 1,024 H800, from the plan's formulas and a small simulation of rollouts and steps.

    python benchmarks/scale.py            # the tables of docs/scale.md, Markdown
    python benchmarks/scale.py --batch 512 --turns 50

Nothing here has been measured on a GPU. Each number below that is no formula of nemo_flashrl/plan/ is an
assumption, and stands in `Site` or `Job`.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from scale_simulation import Rollouts, Simulated, fewest_in_flight

from nemo_flashrl.config import load
from nemo_flashrl.plan.devices import find_device
from nemo_flashrl.plan.fitting import fits, stages
from nemo_flashrl.plan.memory import Layout
from nemo_flashrl.plan.step_time import (
    DECODE_EFFICIENCY,
    UTILISATION,
    decode_tokens_per_second,
    step_time,
    worker_cores,
)
from nemo_flashrl.weights.model_shape import ModelShape, model_shape

DEVICE = find_device("H800")
GIB = 2**30
# Llama 3.1 405B, sizes of the release's config.json; 126 layers, so that pipelines are of 2, 3, 6, 7, 9, 14 or 18.
LLAMA_405B = {
    "model_type": "llama",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
PIPELINES = (1, 2, 3, 4, 6, 7, 8, 9, 14, 16, 18)
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Site:
    """What a cluster of H800 nodes is taken to do; bytes a second."""

    nvlink: float = 160e9  # of one GPU, one direction: 400 GB/s both ways, of which 80% is reached
    nvlink_full: float = 360e9  # the same of an H100, whose measured utilisation the plan's step time rests on
    network: float = 40e9  # of one GPU: 400 Gb/s InfiniBand, of which 80% is reached
    storage_of_a_node: float = 4e9
    storage: float = 60e9  # of all nodes together


@dataclass(frozen=True)
class Job:
    """What is trained on: agents with a tool."""

    batch: int = 128
    context: int = 32768  # a microbatch holds one trajectory of this length, or several shorter ones
    mean_tokens: int = 12000  # of a trajectory; lognormal, cut at the context
    action_share: float = 0.4
    turns: int = 20
    tool_seconds: float = 2.0  # of a turn, exponential
    max_staleness: int = 4
    checkpoint_steps: int = 20


@dataclass(frozen=True)
class Split:
    """A layout, and how its GPUs are shared between trainer and servers."""

    layout: Layout
    server_tensor: int
    servers: int
    step: StepParts

    @property
    def rollout_gpus(self) -> int:
        return self.servers * self.server_tensor


@dataclass(frozen=True)
class StepParts:
    """Seconds of one optimizer step on the trainer."""

    compute: float  # at the plan's utilisation, without the pipeline's bubble
    bubble: float
    tensor: float  # what tensor parallelism loses on an H800's NVLink beside an H100's
    gradients: float  # reduce-scatter and all-gather over data-parallel ranks, not hidden

    @property
    def total(self) -> float:
        return self.compute + self.bubble + self.tensor + self.gradients


def models() -> dict[str, ModelShape]:
    configs = {
        name: load("rehearsal", ["output=x", "model.path=x", f"+model={name}"]) for name in ("llama3_8b", "llama3_70b")
    }
    shapes = {name: model_shape(config.model.hf_config) for name, config in configs.items()}
    return {"8B": shapes["llama3_8b"], "70B": shapes["llama3_70b"], "405B": model_shape(LLAMA_405B)}


def step_parts(shape: ModelShape, layout: Layout, job: Job, site: Site) -> StepParts:
    """Seconds of a step. Microbatches hold whole trajectories, at most `job.context` tokens, 90% filled."""
    tokens = job.batch * job.mean_tokens
    microbatches = max(1, math.ceil(tokens / (0.9 * job.context * layout.data)))
    filled = microbatches * layout.data * job.context * 0.9 / tokens  # data ranks wait for the fullest
    time = step_time(shape, layout, DEVICE, tokens=tokens * max(1.0, filled), trajectory_tokens=job.mean_tokens)
    compute = time.total / (layout.ranks * DEVICE.bf16_tflops * 1e12 * UTILISATION)
    bubble = compute * (layout.pipeline - 1) / microbatches
    # Sequence parallelism gathers and scatters the hidden state twice a layer: forward, backward, and recomputed.
    passes = 3 if layout.recompute == "full" else 2
    of_a_rank = tokens / (layout.data * layout.context) * shape.layers / layout.pipeline
    moved = 4 * passes * of_a_rank * shape.hidden * 2 * (layout.tensor - 1) / layout.tensor
    tensor = moved * (1 / site.nvlink - 1 / site.nvlink_full)
    replicas = layout.data * layout.context
    shard = shape.parameters / (layout.tensor * layout.pipeline)
    gradients = shard * (4 + 2) * (replicas - 1) / replicas / site.network
    return StepParts(compute, bubble, tensor, gradients)


def layouts(shape: ModelShape, gpus: int, job: Job) -> Iterator[Layout]:
    """Every layout of exactly `gpus` that fits, tensor ranks within a node."""
    for tensor, pipeline, context, recompute in itertools.product(
        (1, 2, 4, 8), PIPELINES, (1, 2), ("selective", "full")
    ):
        ranks = tensor * pipeline * context
        if gpus % ranks or shape.layers % pipeline or gpus // ranks > job.batch:
            continue
        layout = Layout(tensor, pipeline, context, gpus // ranks, recompute=recompute, head_chunk=2048)
        if fits(shape, layout, DEVICE, job.context):
            yield layout


def server_tensor(shape: ModelShape) -> int:
    """GPUs of one server: the weights in bf16 and as much again for the cache."""
    return next(
        t for t in (1, 2, 4, 8, 16) if 2 * shape.parameters < 0.5 * 0.9 * DEVICE.memory_gib * GIB * t or t == 16
    )


def best_split(shape: ModelShape, gpus: int, job: Job, site: Site) -> Split | None:
    """The trainer's share that makes the longer of training and sampling shortest; None where nothing fits."""
    tensor = server_tensor(shape)
    speed, _ = decode_tokens_per_second(shape, DEVICE, context_tokens=job.mean_tokens, tensor=tensor)
    best, least = None, math.inf
    for eighths in range(1, 8):
        trainer = gpus * eighths // 8
        servers = (gpus - trainer) // tensor
        if servers < 1:
            continue
        sampling = job.batch * job.mean_tokens * job.action_share / (speed * servers * tensor)
        for layout in layouts(shape, trainer, job):
            parts = step_parts(shape, layout, job, site)
            if max(parts.total, sampling) < least:
                best, least = Split(layout, tensor, servers, parts), max(parts.total, sampling)
    return best


def run_split(shape: ModelShape, split: Split, job: Job, refit: float) -> tuple[int, Simulated]:
    """(episodes in flight, the simulation) of a split; fewer episodes a server decode faster each."""
    _, slots = decode_tokens_per_second(shape, DEVICE, context_tokens=job.mean_tokens, tensor=split.server_tensor)
    weights, cache = 2 * shape.parameters, 2 * 2 * shape.layers * shape.key * job.mean_tokens / 2
    bandwidth = DEVICE.bandwidth_gb * 1e9 * split.server_tensor * DECODE_EFFICIENCY

    def rollouts(in_flight: int) -> Rollouts:
        rate = bandwidth / (weights + max(1.0, in_flight / split.servers) * cache)
        return Rollouts(in_flight, rate, job.mean_tokens, job.context, job.action_share, job.turns, job.tool_seconds)

    return fewest_in_flight(
        rollouts,
        slots * split.servers,
        batch=job.batch,
        train=split.step.total,
        refit=refit,
        max_staleness=job.max_staleness,
    )


def refit_seconds(shape: ModelShape, split: Split, site: Site) -> tuple[float, float]:
    """(by files on the shared storage, by broadcast): weights in bf16 written once, read by every server."""
    size = 2 * shape.parameters
    server_nodes = max(1, split.rollout_gpus // 8)
    write = size / min(site.storage, site.storage_of_a_node)  # one process writes what the ranks gather
    read = size * server_nodes / min(site.storage, site.storage_of_a_node * server_nodes)
    return write + read, size / site.network  # a chain in chunks: as fast as one link


def checkpoint_seconds(shape: ModelShape, split: Split, site: Site) -> float:
    """14 bytes a parameter: bf16 weights, fp32 weights and Adam's two moments, written by all nodes."""
    nodes = max(1, split.layout.ranks // 8)
    return 14 * shape.parameters / min(site.storage, site.storage_of_a_node * nodes)


def breaks_first(shape: ModelShape, split: Split, job: Job, site: Site, run: Simulated, refit: float) -> str:
    """The largest of the shares that grow with the cluster or the model."""
    step = split.step
    fullest = max(s.device for s in stages(shape, split.layout, job.context)) / (DEVICE.memory_gib * GIB)
    shares = {
        "pipeline bubble: the batch has too few microbatches": step.bubble / step.total,
        "refit, though broadcast": refit / run.seconds,
        "gradient exchange": step.gradients / step.total,
        "rollouts: the trainer waits": run.waiting,
        "stale trajectories": run.dropped,
        "tensor parallelism over 400 GB/s": step.tensor / step.total,
        "checkpoint": checkpoint_seconds(shape, split, site) / job.checkpoint_steps / run.seconds,
    }
    name, share = max(shares.items(), key=lambda item: item[1])
    return f"{name} ({share:.0%})" if share > 0.1 else f"memory ({fullest:.0%} full)"


def rows(job: Job, site: Site) -> Iterator[tuple[list[str], list[str]]]:
    """(line of the layouts' table, line of the times' table) of every model and size that can be run."""
    for (name, shape), gpus in itertools.product(models().items(), GPUS):
        split = best_split(shape, gpus, job, site)
        if split is None:
            continue
        layout, step = split.layout, split.step
        files, broadcast = refit_seconds(shape, split, site)
        in_flight, run = run_split(shape, split, job, broadcast)
        fullest = max(s.device for s in stages(shape, layout, job.context)) / GIB
        tokens = job.batch * job.mean_tokens / run.seconds
        turns = job.batch * job.turns / run.seconds
        yield (
            [name, str(gpus), f"{layout.ranks} : {split.rollout_gpus}"]
            + [f"{layout.tensor} x {layout.pipeline} x {layout.context} x {layout.data}", layout.recompute]
            + [f"{fullest:.0f}", f"{split.servers} x {split.server_tensor}", f"{14 * shape.parameters / 1e12:.2f}"]
            + [f"{checkpoint_seconds(shape, split, site):.0f}"],
            [
                name,
                str(gpus),
                f"{step.total:.0f}",
                f"{step.compute / step.total:.0%}",
                f"{step.bubble / step.total:.0%}",
            ]
            + [f"{step.tensor / step.total:.0%}", f"{step.gradients / step.total:.0%}"]
            + [f"{2 * shape.parameters / 1e9:.0f}", f"{files:.0f}", f"{broadcast:.1f}", f"{run.seconds:.0f}"]
            + [f"{run.waiting:.0%}", f"{in_flight}", f"{run.staleness:.1f}", f"{run.dropped:.0%}"]
            + [f"{turns:.0f}", f"{math.ceil(worker_cores(turns))}"]
            + [f"{tokens / gpus:.0f}", breaks_first(shape, split, job, site, run, broadcast)],
        )


LAYOUT_COLUMNS = (
    "model|GPUs|trainer : servers|TP x PP x CP x DP|recompute|GiB a rank|servers x TP|checkpoint TB|checkpoint s"
)
TIME_COLUMNS = (
    "model|GPUs|train s|compute|bubble|TP|gradients|refit GB|by files s|by broadcast s|step s|trainer waits|in flight|"
    "staleness|dropped|turns/s|worker cores|tokens/s a GPU|breaks first"
)


def table(columns: str, lines: list[list[str]]) -> str:
    """A Markdown table."""
    head = columns.split("|")
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description="The tables of docs/scale.md.")
    parser.add_argument("--batch", type=int, default=Job.batch, help="trajectories of a step")
    parser.add_argument("--turns", type=int, default=Job.turns, help="calls of a tool in a trajectory")
    options = parser.parse_args()
    job = replace(Job(), batch=options.batch, turns=options.turns)
    layouts_table, times_table = zip(*rows(job, Site()), strict=True)
    print(table(LAYOUT_COLUMNS, list(layouts_table)), table(TIME_COLUMNS, list(times_table)), sep="\n\n")


if __name__ == "__main__":
    main()
