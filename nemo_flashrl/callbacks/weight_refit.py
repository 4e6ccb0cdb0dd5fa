"""After every optimizer step the sampler gets the policy's weights, as a stream of Hugging Face names."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl

from nemo_flashrl.rollout.driver import RolloutDriver
from nemo_flashrl.weights.shards import stream_hf_tensors, unwrap


class WeightRefitCallback(pl.Callback):
    """Streams live shards to the rollout engine.

    Args:
        driver: the collecting rank's; None on every other rank, which takes part in the gathers alone.
        vocab_size: rows of the embedding without padding.
    """

    def __init__(self, driver: RolloutDriver | None, vocab_size: int) -> None:
        self.driver = driver
        self.vocab_size = vocab_size
        self.seconds = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The sampler starts from the trainer's weights, whatever it was loaded with."""
        self._refit(pl_module, trainer.global_step)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """The policy version is the number of optimizer steps that made it."""
        if self.driver is not None:
            self.driver.trained()
        self._refit(pl_module, trainer.global_step)

    def _refit(self, pl_module: pl.LightningModule, version: int) -> None:
        started = time.perf_counter()
        stream = stream_hf_tensors(unwrap(pl_module), self.vocab_size)
        try:
            if self.driver is not None:
                self.driver.load_weights(stream, version)
        finally:
            for (
                _
            ) in stream:  # every rank walks to the end: a loader that failed half-way must not leave the others waiting
                pass
        self.seconds = time.perf_counter() - started
