"""One step of GRPO with a KL to a frozen reference of other weights, as a configuration builds it."""

from __future__ import annotations

import os
from pathlib import Path

import lightning.pytorch as pl
from doubles import text_tokenizer

from nemo_flashrl.algorithms.grpo import Grpo, GrpoSettings
from nemo_flashrl.build import build_data, build_model, build_reference, build_trainer
from nemo_flashrl.config import load
from nemo_flashrl.preflight import prepare as preflight
from nemo_flashrl.weights.hf_folder import load_hf_folder
from nemo_flashrl.weights.shards import unwrap
from workers.parity import Capture, Driver


class OtherPolicy(pl.Callback):
    """Gives the policy other weights once the reference has been taken."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.folder, self.vocab_size = folder, vocab_size

    def on_train_start(self, trainer, module) -> None:
        load_hf_folder(unwrap(module), self.folder, self.vocab_size)


class CaptureAll(Capture):
    """With the numbers that the writing rank would log beside the reduced ones."""

    def on_megatron_step_end(self, step, **_) -> None:
        super().on_megatron_step_end(step, **_)
        self.gradients = {"gradients": self.gradients, "metrics": dict(step.trainer.datamodule.current_step.metrics)}


def main(reference: Path, policy: Path, trajectories: Path, out: Path, vocab_size: int, *overrides: str) -> None:
    config = load(
        "rehearsal",
        [f"output={out.parent / 'unused'}", f"model.path={reference}", "algorithm=grpo", "trainer.steps=1", *overrides],
    )
    algorithm = preflight.with_reference(config, Grpo(GrpoSettings(group_size=4)))
    parts = preflight.Parts(algorithm, object, None, [], text_tokenizer(), vocab_size, data_parallel=1)
    driver = Driver(trajectories) if os.environ["RANK"] == "0" else None
    callbacks = [*build_reference(config, parts), OtherPolicy(policy, vocab_size), CaptureAll(out, vocab_size)]
    trainer = build_trainer(config, callbacks)
    trainer.fit(build_model(config, parts), datamodule=build_data(config, parts, driver))
