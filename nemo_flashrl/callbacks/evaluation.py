"""Every few optimizer steps the sampler plays tasks that training never asks for, with the policy and the reference."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import lightning.pytorch as pl

from nemo_flashrl.callbacks.reference import EMAReferenceCallback
from nemo_flashrl.callbacks.weight_refit import WeightRefitCallback
from nemo_flashrl.engines.base import Engine
from nemo_flashrl.records import Trajectory
from nemo_flashrl.rollout.driver import RolloutDriver
from nemo_flashrl.rollout.metrics import environment_errors, pass_at_k, success_by_class, success_rate


class EvaluationCallback(pl.Callback):
    """Adds `evaluation_*`, and `reference_evaluation_*` where a reference is asked about, to a step's metrics.

    Comes after the refit, whose weights the sampler then serves, and before the metrics are written.

    Args:
        driver: the collecting rank's; None on the others, which take part in the gathers of the reference's weights.
        play: plays the held-out tasks with an engine, `samples` episodes each.
        refit: hands over weights.
        every_steps: optimizer steps between two evaluations; the last step of a run is evaluated too.
        samples: of each task; above 1 also the share of tasks that one of so many solves is reported.
        reference: whose weights are played too. In between the sampler serves them: nothing else may be in flight.
        classes: of each held-out task, whose success is reported beside that of all.
    """

    def __init__(
        self,
        driver: RolloutDriver | None,
        play: Callable[[Engine], Awaitable[Sequence[Trajectory]]],
        refit: WeightRefitCallback,
        *,
        every_steps: int,
        samples: int = 1,
        reference: EMAReferenceCallback | None = None,
        classes: Sequence[str] = (),
    ) -> None:
        self.driver, self.play, self.refit = driver, play, refit
        self.classes = classes
        self.every_steps, self.samples, self.reference = every_steps, samples, reference

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Where the step is one of those, play; a collective over all ranks if there is a reference."""
        if trainer.global_step % self.every_steps and trainer.global_step != trainer.max_steps:
            return
        started = time.perf_counter()
        metrics = self._played("evaluation")
        if self.reference is not None:
            with self.reference.swapped_in():
                self.refit.sync_weights(trainer, pl_module)
            metrics |= self._played("reference_evaluation")
            self.refit.sync_weights(trainer, pl_module)
        trainer.datamodule.current_step.report({**metrics, "evaluating_seconds": time.perf_counter() - started})

    def _played(self, name: str) -> dict[str, float]:
        if self.driver is None:
            return {}
        trajectories = self.driver.use(self.play)
        if trajectories is None:  # the run was asked to stop
            return {}
        metrics = {
            f"{name}_success": success_rate(trajectories),
            f"{name}_reward": sum(t.reward for t in trajectories) / len(trajectories),
            f"{name}_environment_errors": float(environment_errors(trajectories)),
        }
        by_class = success_by_class(trajectories, self.classes)
        metrics |= {f"{name}_success_{kind}": success for kind, success in by_class.items()}
        if self.samples > 1:
            metrics[f"{name}_pass_at_{self.samples}"] = pass_at_k(trajectories, self.samples)
        return metrics
