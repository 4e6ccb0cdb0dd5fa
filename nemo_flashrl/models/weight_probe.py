"""What the trainer computes for a sampler's probe, under the weights of the moment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch
from megatron.core import parallel_state
from nemo.lightning.megatron_parallel import MegatronParallel

from nemo_flashrl import platform
from nemo_flashrl.data.context_parallel import context_share
from nemo_flashrl.models.policy_head import find_head
from nemo_flashrl.models.scoring import score
from nemo_flashrl.rollout.probe import Probe, probe_token_ids

# Mean nats a token. In bf16 the trainer's kernels and the sampler's round differently.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1}


def weight_probe(pipeline: MegatronParallel, vocab_size: int) -> Probe:
    """A probe for the weights that the next stream carries, on every rank; a collective over all ranks."""
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
    return Probe(token_ids, logprobs, TOLERANCES[next(pipeline.parameters()).dtype])


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
