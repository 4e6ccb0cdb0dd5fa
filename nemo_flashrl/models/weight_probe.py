"""What the trainer computes for a sampler's probe, under the weights of the moment."""

from __future__ import annotations

from dataclasses import replace

import torch
from nemo.lightning.megatron_parallel import MegatronParallel

from nemo_flashrl import platform
from nemo_flashrl.models.policy_head import find_head
from nemo_flashrl.models.scoring import score
from nemo_flashrl.rollout.probe import Probe, probe_token_ids

# Mean nats a token. In bf16 the trainer's kernels and the sampler's round differently.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1}


def weight_probe(pipeline: MegatronParallel, vocab_size: int) -> Probe:
    """A probe for the weights that the next stream carries, on every rank; a collective over all ranks."""
    token_ids = probe_token_ids(vocab_size)
    sequence = torch.tensor([token_ids], device=platform.device())
    microbatch = {
        "tokens": sequence,
        "targets": sequence.roll(-1, dims=1),  # the last one is the first again, and not used
        "position_ids": torch.arange(len(token_ids), device=platform.device())[None],
    }
    head = find_head(pipeline)
    if head is None:
        scores = score(pipeline, [microbatch])
    else:
        sampled = head.settings
        head.settings = replace(sampled, temperature=1.0)  # servers score a prompt without one
        try:
            scores = score(pipeline, [microbatch])
        finally:
            head.settings = sampled
    logprobs = None if scores is None else scores[0].logprobs[0, :-1].tolist()
    everyone = [logprobs] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, logprobs, group=platform.object_group())
    known = next(answer for answer in everyone if answer is not None)
    return Probe(token_ids, tuple(known), TOLERANCES[next(pipeline.parameters()).dtype])
