"""Decisions about whole trajectories whose tokens are spread over two ranks, against those of one rank that has all."""

from __future__ import annotations

from dataclasses import replace

import torch

from nemo_flashrl import platform
from nemo_flashrl.algorithms.algorithm import ContextShare, TokenBatch
from nemo_flashrl.algorithms.flash_reinforce import FlashReinforce, FlashReinforceSettings
from nemo_flashrl.algorithms.grpo import Grpo, GrpoSettings
from nemo_flashrl.data.context_parallel import held_positions

ROWS, LENGTH, BATCHES = 6, 24, 200
ALGORITHMS = (
    FlashReinforce(FlashReinforceSettings(delta=0.05, negative_token_fraction=0.3)),
    Grpo(GrpoSettings(group_size=2)),
)


def random_batch(seed: int) -> tuple[torch.Tensor, TokenBatch]:
    """(log-probs [N], the whole microbatch); row 0 is padding, entropies are coarse, so that many are equal."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    mask = uniform(ROWS, LENGTH) < 0.5
    mask[0] = False
    behavior = torch.log(uniform(ROWS, LENGTH) * 0.98 + 0.01)
    shift = torch.randn(ROWS, LENGTH, generator=generator) * uniform(ROWS, 1)
    shift[-1, -1] = 25 * (seed % 3 == 0)  # beyond the ratio guard
    logprobs = (behavior - shift.abs()).masked_fill(~mask, torch.nan)
    return logprobs.flatten(), TokenBatch(
        behavior_logprobs=behavior.flatten(),
        action_mask=mask.flatten(),
        row=torch.arange(ROWS).repeat_interleave(LENGTH),
        advantages=torch.randn(ROWS, generator=generator),
        token_weights=torch.ones(ROWS),
        failures=uniform(ROWS) < 0.5,
        entropies=(uniform(ROWS, LENGTH) * 4).floor().flatten(),
    )


def main() -> None:
    torch.distributed.init_process_group(platform.backend())
    rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD
    position = held_positions(LENGTH, rank, 2)
    held = (torch.arange(ROWS)[:, None] * LENGTH + position).flatten()
    differ_alone = 0
    for seed in range(BATCHES):
        logprobs, whole = random_batch(seed)
        per_token = ("behavior_logprobs", "action_mask", "row", "entropies")
        part = replace(whole, **{name: getattr(whole, name)[held] for name in per_token})
        shared = replace(part, context=ContextShare(group, position.repeat(ROWS)))
        for algorithm in ALGORITHMS:
            expected = algorithm.gate(logprobs, whole)
            found = algorithm.gate(logprobs[held], shared)
            assert torch.equal(found.keep, expected.keep[held]), seed
            for name, value in found.per_row.items():
                torch.testing.assert_close(value, expected.per_row[name], rtol=1e-6, atol=1e-9)
            for name, value in found.stats.items():
                largest = name.endswith("_max")
                operation = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
                torch.distributed.all_reduce(value, op=operation)
                torch.testing.assert_close(value, expected.stats[name], rtol=1e-5, atol=1e-6)
            differ_alone += not torch.equal(algorithm.gate(logprobs[held], part).keep, found.keep)
    assert differ_alone > BATCHES / 2  # a gate that looks at a rank's own tokens decides otherwise
