"""The no-grad score pass inside a real training step: its answers, and what it leaves untouched."""

from __future__ import annotations

import os
from pathlib import Path

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from nemo_flashrl.models.scoring import check_passes_agree, score
from workers.parity import Driver, make_run


class Scorer(pl.Callback):
    """Scores the step's microbatches before they are trained on, and reports what happened."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def on_megatron_microbatches_start(self, step) -> None:
        microbatches = list(step.data)
        step.data = iter(microbatches)
        pipeline = step.pipeline
        modes, generators = [m.training for m in pipeline.modules()], random_states()
        scores = score(pipeline, microbatches, entropies=True)
        check_passes_agree(pipeline, microbatches[0])
        plain = score(pipeline, microbatches)
        failed = parallel_state.get_pipeline_model_parallel_world_size() > 1  # the other stage would wait
        if not failed:
            try:
                score(pipeline, [{"tokens": microbatches[0]["tokens"]}])
            except KeyError:
                failed = True
        same = [m.training for m in pipeline.modules()] == modes and all(modes)
        same &= all(torch.equal(a, b) for a, b in zip(generators, random_states(), strict=True))
        last = parallel_state.is_pipeline_last_stage()
        rows = []
        if last:
            assert all((a.logprobs - b.logprobs).abs().max() < 1e-5 for a, b in zip(scores, plain, strict=True))
            assert plain[0].entropies is None and not scores[0].logprobs.requires_grad
            rows = [row for m, s in zip(microbatches, scores, strict=True) for row in by_trajectory(m, s)]
        assert (scores is not None) == last
        everyone = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, (rows, failed and same))
        if torch.distributed.get_rank() == 0:
            torch.save({"rows": [r for rows, _ in everyone for r in rows], "same": [s for _, s in everyone]}, self.out)


def random_states() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *get_cuda_rng_tracker().get_states().values()]


def by_trajectory(microbatch, scores) -> list[tuple]:
    """(tokens but the first, log-probs, entropies) of each trajectory, without padding."""
    out = []
    for row, length in enumerate(microbatch["lengths"].tolist()):
        if length:
            own = (microbatch["row_index"] == row).flatten().nonzero().flatten()[:length]
            # The last stage has targets alone: the tokens but the first.
            values = (t.flatten()[own] for t in (scores.logprobs, scores.entropies))
            out.append((microbatch["targets"].flatten()[own][:-1], *values))
    return out


def main(
    model_folder: Path, trajectories: Path, out: Path, vocab_size: int, *overrides: str, dropout: float = 0.0
) -> None:
    driver = Driver(trajectories) if os.environ["RANK"] == "0" else None
    trainer, model, data = make_run(model_folder, out, vocab_size, driver, [Scorer(out)], overrides, dropout=dropout)
    trainer.fit(model, datamodule=data)
