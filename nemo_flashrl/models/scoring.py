"""Log-probs without a gradient: one forward pass over a step's microbatches through Megatron's own pipeline schedule.

    scores = score(pipeline, microbatches)          # on the last stage one TokenScores a microbatch, else None

Legend: R = rows of a microbatch, S = row length, H = hidden size.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from nemo.lightning.megatron_parallel import MegatronParallel
from torch import Tensor

from nemo_flashrl import platform
from nemo_flashrl.data.context_parallel import context_share
from nemo_flashrl.models.policy_head import find_head
from nemo_flashrl.weight_sync.probe import Probe, probe_token_ids

FP32_AGREEMENT = 1e-3  # nats of the worst token: only dropout or noise moves the two passes so far apart
RANDOM_FIELDS = ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps")
# What a probe may be off, mean nats a token. In fp32 on a CPU 5e-6 was measured between Megatron and transformers, 1e-5
# to vLLM; GPUs may multiply fp32 in fewer bits. Nothing was measured on one.
FP32_TOLERANCE, FP32_TOLERANCE_ON_GPU = 1e-4, 1e-3
# In bf16 each layer rounds to 8 bits, 2^-8 of a value at most, in an order of its own in each program: errors add up as
# a random walk, sqrt(layers), and move logits in proportion to their spread. In units of spread x 2^-8, the mean
# difference over the probe between Megatron and transformers, both in bf16 on a CPU, with random models of hidden 64 to
# 1024, 2 to 48 layers, tied and not, dense and of 16 experts, spread 1 to 10, was 0.9 to 5.3, and nowhere more than 2 +
# 0.7 sqrt(layers). The first sync may be off by three times that. Which part of it a model, two programs and a machine
# really have is what this sync measures: later ones may be off by three times the first. A head that was old by 5% of
# its size was 9 to 14 of these units off, by 10% 17 to 28.
BF16_ROUNDING = 2.0**-8
BF16_MARGIN = 3.0
SMALLEST_SPREAD = 1.0  # nats; less was not measured


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What the model says of one microbatch's targets, at the sampler's temperature."""

    logprobs: Tensor  # float32 [R, S], aligned to `targets`
    entropies: Tensor | None = None  # float32 [R, S]


def score(
    pipeline: MegatronParallel, microbatches: Sequence[dict[str, Tensor]], *, entropies: bool = False
) -> list[TokenScores] | None:
    """Score `targets` of each microbatch, in evaluation mode; a collective over the model-parallel ranks.

    Dropout draws nothing, so that random generators stay as they were; every module's mode is restored, on an error
    too.

    Args:
        pipeline: NeMo's wrapper of the policy model, one chunk a rank.
        microbatches: as the data module makes them; at least one, the same number on every rank.
        entropies: also the entropy of each token's distribution.

    Returns:
        One answer a microbatch on the last pipeline stage, None on the others.
    """
    with _evaluation_mode(pipeline):
        return _forward(pipeline, microbatches, entropies)


@torch.no_grad()
def _forward(
    pipeline: MegatronParallel, microbatches: Sequence[dict[str, Tensor]], entropies: bool
) -> list[TokenScores] | None:
    def forward_step(data: Iterator[dict[str, Tensor]], model: torch.nn.Module):
        return model.score_step(next(data), entropies=entropies), _answer

    assert len(pipeline) == 1, "a virtual pipeline is not scored"
    first = microbatches[0]["tokens"]
    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(microbatches),
        model=pipeline.pipeline,
        num_microbatches=len(microbatches),
        seq_length=first.shape[1],
        micro_batch_size=first.shape[0],
        forward_only=True,
        collect_non_loss_data=True,
    )
    return outputs or None


def _answer(output: Tensor, non_loss_data: bool) -> TokenScores:
    """What the head said, [R, S] log-probs or [R, S, 2] with entropies."""
    assert non_loss_data
    return TokenScores(output) if output.dim() == 2 else TokenScores(*output.unbind(-1))


@contextlib.contextmanager
def _evaluation_mode(module: torch.nn.Module) -> Iterator[None]:
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def check_passes_agree(pipeline: MegatronParallel, microbatch: dict[str, Tensor]) -> None:
    """Refuse a model whose log-probs in training mode are not those of the score pass. A collective over all ranks.

    Ratios and KL compare the two: with dropout on, they would measure its noise.

    Raises:
        ValueError: on every rank, with both log-probs of the worst token and the fields that make the difference.
    """
    trained, scored = _forward(pipeline, [microbatch], False), score(pipeline, [microbatch])
    worst, config = (0.0, 0.0, 0.0), pipeline.module.config
    if scored is not None:
        answers = (trained[0].logprobs, scored[0].logprobs, microbatch["target_mask"].float())
        *both, mask = torch.stack(answers).cpu()
        both = torch.stack(both)[:, mask > 0].double()
        worst = disagreement(both, next(pipeline.parameters()).dtype, config.num_layers)
    everyone: list[tuple[float, ...]] = [worst] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, worst, group=platform.object_group())
    distance, in_training, without_gradient = max(everyone)
    if distance > 1:
        on = [f"{name}={value}" for name in RANDOM_FIELDS if (value := getattr(config, name, None))]
        raise ValueError(
            f"model configuration {', '.join(on) or '(no dropout)'}: a token's log-prob is {in_training:.6g} in the "
            f"training pass and {without_gradient:.6g} in the no-grad pass; set dropout and jitter to 0"
        )


def disagreement(logprobs: Tensor, dtype: torch.dtype, layers: int) -> tuple[float, float, float]:
    """How far apart two passes over N tokens are, in what is allowed, and both log-probs of the worst token.

    In fp32 the worst token counts. In bf16 one token may be far off: attention on a GPU has a kernel for training and
    another without, which round in another order. What counts is then the mean over tokens, which may be what it may
    be between two programs; a dropout of 0.1 moves it by ten times that.

    Args:
        logprobs: float64 [2, N], in training mode and scored.
    """
    distance = (logprobs[0] - logprobs[1]).abs().nan_to_num(nan=math.inf)
    if not distance.numel():
        return 0.0, 0.0, 0.0
    if dtype == torch.bfloat16:
        allowed = BF16_MARGIN * _units(layers) * _unit(float(logprobs[1].std(correction=0).nan_to_num(0.0)))
        share = float(distance.mean()) / allowed
    else:
        share = float(distance.max()) / FP32_AGREEMENT
    return (share, *logprobs[:, distance.argmax()].tolist())


def first_states(pipeline: MegatronParallel, microbatches: Sequence[dict[str, Tensor]]) -> list[Tensor] | None:
    """The hidden state that each trajectory's first trained token is predicted from, with R trajectories.

    float32 [R, H] a microbatch on the last pipeline stage, None on others; a pass without gradient, a collective.

    Zeros stand for a trajectory without a trained token.
    """
    head, seen = find_head(pipeline.module), []

    def keep(_: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        hidden = arguments[0]  # [S, G, H], or this rank's part of S
        if head.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden)
        places, known = first_places(microbatches[len(seen)])
        states = hidden.reshape(-1, hidden.shape[-1])[places].float()
        seen.append(torch.where(known[:, None], states, 0))

    hook = head.register_forward_pre_hook(keep) if head is not None else None
    try:
        score(pipeline, microbatches)
    finally:
        if hook is not None:
            hook.remove()
    return [states.cpu() for states in seen] or None


def first_places(microbatch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Where each trajectory's first trained token is predicted, int64 [R] in the head's order; if at all, [R]."""
    mask, count = microbatch["target_mask"], len(microbatch["advantages"])
    rows, length = mask.shape
    beyond = torch.full((count,), mask.numel(), device=mask.device)
    places = torch.where(mask.flatten(), torch.arange(mask.numel(), device=mask.device), mask.numel())
    first = beyond.scatter_reduce(0, microbatch["row_index"].flatten(), places, "amin")
    known = first < mask.numel()
    first = torch.where(known, first, 0)
    return first % length * rows + first // length, known


def weight_probe(pipeline: MegatronParallel, vocab_size: int, first: Probe | None = None) -> Probe:
    """A probe for the weights that the next stream carries, on every rank; a collective over all ranks.

    `first` is that of the first sync, which has measured what rounding makes of this model on these servers.
    """
    token_ids = probe_token_ids(vocab_size)
    rank = parallel_state.get_context_parallel_rank()
    size = parallel_state.get_context_parallel_world_size()
    sequence = torch.tensor([token_ids])
    microbatch = {
        "tokens": sequence,
        "targets": sequence.roll(-1, dims=1),  # the last one is the first again, and not used
        "position_ids": torch.arange(len(token_ids))[None],
    }
    share = {name: value.to(platform.device()) for name, value in context_share(microbatch, rank, size).items()}
    with _at_temperature_one(pipeline):
        scores = score(pipeline, [share])
    own = (
        {}
        if scores is None
        else dict(zip(share["position_ids"][0].tolist(), scores[0].logprobs[0].tolist(), strict=True))
    )
    everyone: list[dict[int, float]] = [own] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, own, group=platform.object_group())
    known = {position: logprob for part in everyone for position, logprob in part.items()}
    logprobs = tuple(known[position] for position in range(len(token_ids) - 1))
    dtype, layers = next(pipeline.parameters()).dtype, pipeline.module.config.num_layers
    return Probe(token_ids, logprobs, probe_tolerance(dtype, layers, logprobs, first))


def probe_tolerance(dtype: torch.dtype, layers: int, logprobs: Sequence[float], first: Probe | None = None) -> float:
    """Mean nats a token by which a sampler with the same weights may be off."""
    if dtype != torch.bfloat16:
        return FP32_TOLERANCE_ON_GPU if platform.has_gpu() else FP32_TOLERANCE
    units = _units(layers)
    if first is not None and first.largest is not None:
        units = min(units, max(1.0, first.largest / _unit(statistics.pstdev(first.logprobs))))
    return BF16_MARGIN * units * _unit(statistics.pstdev(logprobs))


def _units(layers: int) -> float:
    return 2 + 0.7 * math.sqrt(layers)


def _unit(spread: float) -> float:
    return BF16_ROUNDING * max(spread, SMALLEST_SPREAD)


@contextlib.contextmanager
def _at_temperature_one(pipeline: MegatronParallel) -> Iterator[None]:
    """Servers score a prompt without a temperature."""
    head = find_head(pipeline)
    if head is None:
        yield
        return
    sampled = head.settings
    head.settings = replace(sampled, temperature=1.0)
    try:
        yield
    finally:
        head.settings = sampled
