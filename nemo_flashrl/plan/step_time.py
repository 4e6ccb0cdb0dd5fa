"""Where the time of a step goes, in floating-point operations and seconds; and how many rollout GPUs keep up."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_flashrl.plan.devices import Device
from nemo_flashrl.plan.memory import Layout
from nemo_flashrl.weights.model_shape import ModelShape

UTILISATION = 0.4  # of the sheet's FLOP/s: Llama 3 (2024) reports 0.38 to 0.43 on H100
DECODE_EFFICIENCY = 0.6  # of the memory's bandwidth, that a serving engine reaches with a full batch
# What a decoding step takes however small the model is. Assumed, not measured: kernels follow each other in a recorded
# graph, some microseconds each; between two steps the engine schedules, samples and hands out tokens in Python.
KERNELS_PER_LAYER = 10
KERNEL_SECONDS = 3e-6
TURN_SECONDS = 1.0e-3  # of a core of a rollout worker, 240 sampled tokens a turn: docs/benchmarks_rollouts.md
WORKER_USE = 0.7  # of a core, beyond which requests wait for each other
ENGINE_SECONDS = 5e-3


@dataclass(frozen=True, slots=True)
class StepTime:
    """FLOPs of one optimizer step over all ranks, and what they take."""

    trunk: float  # forward and backward through the layers' matrices
    attention: float  # scores and weighted values, causal
    recompute: float  # what is computed a second time
    head: float
    seconds: float

    @property
    def total(self) -> float:
        return self.trunk + self.attention + self.recompute + self.head


def step_time(
    shape: ModelShape, layout: Layout, device: Device, *, tokens: float, trajectory_tokens: float
) -> StepTime:
    """A step that trains on `tokens` tokens in trajectories of `trajectory_tokens`.

    A matrix of n weights costs 2 n a token forward and 4 n backward (Kaplan et al. 2020); causal attention costs
    2 x 2 x S Q / 2 a token and layer forward, S the trajectory's length, and twice that backward. The gated head has
    4 products of 2 H V: logits, logits again, gradient of hidden and of weight. LoRA needs no gradient of these
    weights, and its factors are left out. A pipeline of P stages and M microbatches idles for (P - 1) / M of the time
    that it works (Narayanan et al. 2021).
    """
    matrices = 2 * shape.active_matrix_parameters * tokens
    attention = 2 * trajectory_tokens * shape.query * shape.layers * tokens
    products = 2 if layout.lora_rank else 3
    head = (products + 1) * 2 * shape.hidden * shape.vocab * tokens
    again = {"none": 0.0, "selective": attention, "full": matrices + attention}[layout.recompute]
    total = products * matrices + 3 * attention + again + head
    bubble = 1 + (layout.pipeline - 1) / layout.microbatches
    seconds = total * bubble / (layout.ranks * device.bf16_tflops * 1e12 * UTILISATION)
    return StepTime(products * matrices, 3 * attention, again, head, seconds)


def worker_cores(turns_per_second: float) -> float:
    """Cores of rollout workers that play so many turns a second, when `WORKER_USE` of each is used."""
    return turns_per_second * TURN_SECONDS / WORKER_USE


def key_value_cache(shape: ModelShape, tokens: float) -> float:
    """Bytes of the keys and values of `tokens` tokens in bf16."""
    return 2 * 2 * shape.layers * shape.key * tokens


def decode_tokens_per_second(
    shape: ModelShape, device: Device, *, context_tokens: float, tensor: int = 1
) -> tuple[float, int]:
    """(tokens/s of one GPU, episodes that its cache holds), sampling in bf16 with half of `context_tokens` cached.

    Each decoding step reads all weights and the cache once and multiplies each episode's token with the active
    weights: the slower of both bounds it. The fixed time of a step comes on top, most of it for a small model. The
    batch is what fits beside the weights, 512 at most.

    Raises:
        ValueError: the weights alone do not fit `tensor` GPUs.
    """
    weights = 2 * shape.parameters
    memory = 0.9 * device.memory_gib * 2**30 * tensor
    cache = key_value_cache(shape, context_tokens / 2)
    episodes = min(int((memory - weights) / cache), 512)
    if episodes < 1:
        raise ValueError(f"the weights ({weights / 2**30:.0f} GiB) do not fit {tensor} rollout GPU(s): take more")
    reading = (weights + episodes * cache) / (device.bandwidth_gb * 1e9 * tensor * DECODE_EFFICIENCY)
    products = 2 * (shape.active_matrix_parameters + shape.hidden * shape.vocab) * episodes
    computing = products / (device.bf16_tflops * 1e12 * tensor * UTILISATION)
    fixed = ENGINE_SECONDS + shape.layers * KERNELS_PER_LAYER * KERNEL_SECONDS
    seconds = max(reading, computing) + fixed
    return episodes / seconds / tensor, episodes
