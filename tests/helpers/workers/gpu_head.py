"""The policy head alone on one fake GPU of a tensor-parallel group: launches, waits and memory at true sizes."""

from __future__ import annotations

import torch
from fake_cuda import make_world, seem_to_have_cuda
from gpu_recorder import Answer, Recorder, two_clocks, walk

from nemo_flashrl.ops import fused_linear_gated_policy_loss


def main(tokens: int, hidden: int, vocab: int, tensor: int, chunk: int) -> dict:
    seem_to_have_cuda()
    make_world(tensor)
    answers = [
        Answer("ops/", "selected.all()", True),
        Answer("ops/", "any()", False),
        Answer("ops/", "live.sum()", chunk),
        Answer("ops/", "grad_output", 1.0),
        Answer("ops/", "tokens[", 0),
        Answer("ops/", "nonzero()", tokens // tensor),
    ]
    recorder = Recorder(answers)
    with recorder:
        device, wide = torch.device("cuda", 0), torch.float32
        states = torch.empty(tokens // tensor, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(vocab // tensor, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
        grad_weight = torch.empty(vocab // tensor, hidden, device=device, dtype=wide)
        targets = torch.empty(tokens, device=device, dtype=torch.int64)
        mask = torch.empty(tokens, device=device, dtype=torch.bool)
        keep, coefficient = torch.empty_like(mask), torch.empty(tokens, device=device)
        before = recorder.current
        recorder.restart()
        loss = fused_linear_gated_policy_loss(
            states,
            weight,
            targets,
            lambda logprobs, entropies: keep,
            lambda logprobs, kept, at: (coefficient[at] * logprobs, torch.where(kept[at], coefficient[at], 0)),
            tp_group=torch.distributed.group.WORLD if tensor > 1 else None,
            vocab_size=vocab,
            chunk_tokens=chunk,
            mask=mask,
            sequence_parallel=tensor > 1,
            grad_weight=grad_weight,
            on_grad_weight=lambda: None,
            logits_budget_bytes=64 * 2**20,
        )[0]
        loss.backward()
        syncs = list(walk(recorder))
        return {
            "launches": recorder.launches,
            "syncs": syncs,
            "peak": recorder.peak - before,
            "clocks": two_clocks(recorder.events),
        }
