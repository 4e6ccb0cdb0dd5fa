"""After every optimizer step the sampler gets the policy's weights, as a stream of Hugging Face names."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl

from nemo_flashrl.models.scoring import weight_probe
from nemo_flashrl.rollout.driver import RolloutDriver
from nemo_flashrl.weight_sync.probe import Probe, ProbedWeights
from nemo_flashrl.weights.adapters import stream_adapter
from nemo_flashrl.weights.shards import stream_hf_tensors, unwrap


class WeightRefitCallback(pl.Callback):
    """Streams live shards to the rollout engine.

    Args:
        driver: the collecting rank's; None on every other rank, which takes part in the gathers alone.
        probed: a probe of the weights goes with them, for engines that verify what their servers have loaded.
        adapter: the LoRA adapter alone travels; the engine holds the base.
    """

    def __init__(self, driver: RolloutDriver | None, *, probed: bool = False, adapter: bool = False) -> None:
        self.driver = driver
        self.probed = probed
        self.adapter = adapter
        self.seconds = 0.0
        self.probe: Probe | None = None  # of the last sync
        self._first_probe: Probe | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The sampler starts from the trainer's weights, whatever it was loaded with."""
        self.sync_weights(trainer, pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """The policy version is the number of optimizer steps that made it."""
        if self.driver is not None:
            self.driver.trained()
        self.sync_weights(trainer, pl_module)

    def sync_weights(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The module's weights of this moment, to the sampler. A collective over all ranks."""
        started = time.perf_counter()
        model, vocab_size = unwrap(pl_module), pl_module.head.vocab_size
        pipeline = trainer.strategy.megatron_parallel
        self.probe = weight_probe(pipeline, vocab_size, self._first_probe) if self.probed else None
        self._first_probe = self._first_probe or self.probe
        stream = stream_adapter(model, scaled=True) if self.adapter else stream_hf_tensors(model, vocab_size)
        try:
            if self.driver is not None:
                weights = stream if self.probe is None else ProbedWeights(stream, self.probe)
                self.driver.load_weights(weights, trainer.global_step)
        finally:
            for _ in stream:  # every rank walks to the end: a loader that failed must not leave the others waiting
                pass
        self.seconds = time.perf_counter() - started
