"""The reference policy: a second set of weights that stays, is copied now and then, or follows as an average.

optimizer step -> follow                                  unless the step was skipped
next step's microbatches -> swapped in -> score pass -> `reference_logprobs` -> swapped out -> training
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state
from nemo.lightning.megatron_parallel import MegatronStep
from torch import Tensor

from nemo_flashrl import platform
from nemo_flashrl.models.scoring import TokenScores, score
from nemo_flashrl.models.shadow_weights import ShadowWeights
from nemo_flashrl.weights.shards import unwrap

MODES = ("frozen", "hard", "ema")


class EMAReferenceCallback(pl.Callback):
    """Keeps the reference policy and scores every batch with it.

    The reference starts as the weights that training starts from. It costs 4 bytes a parameter of host memory on each
    rank. A checkpoint holds it through two methods that go beyond Lightning's: `sharded_state_dict(model)`, tensors of
    a Megatron distributed checkpoint, and `load_shadow(tensors)`, which takes what a load of those returns.

    Args:
        mode: "frozen"; "hard" (a copy of the policy every `every` optimizer steps); "ema" (an fp32 average).
        every: optimizer steps between two copies.
        beta: reference = beta * reference + (1 - beta) * policy after each optimizer step.
        evaluate: also report the reference's own mean log-prob and entropy over action tokens.

    Raises:
        ValueError: a setting out of range.
    """

    def __init__(self, mode: str = "ema", *, every: int = 100, beta: float = 0.99, evaluate: bool = False) -> None:
        if mode not in MODES:
            raise ValueError(f"reference.mode={mode!r}: must be one of {', '.join(MODES)}")
        if every < 1:
            raise ValueError(f"reference.every={every!r}: must be at least 1")
        if not 0 <= beta < 1:
            raise ValueError(f"reference.beta={beta!r}: must be at least 0, below 1")
        self.settings = {"mode": mode, "every": every, "beta": beta}
        self.evaluate = evaluate
        self.updates = 0  # optimizer steps that changed the policy
        self.shadow: ShadowWeights | None = None
        self._updated = False  # whether the last optimizer step did

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Copy the weights, before a checkpoint is restored over both sets."""
        self.shadow = ShadowWeights(unwrap(pl_module))
        for optimizer in trainer.strategy.optimizers:
            self._watch(optimizer.mcore_optimizer)

    def _watch(self, optimizer: Any) -> None:
        """NeMo drops what Megatron's optimizer returns first: whether it found gradients that it could apply."""
        step = optimizer.step

        @functools.wraps(step)
        def watched() -> tuple:
            answer = step()
            self._updated = bool(answer[0])
            return answer

        optimizer.step = watched

    def on_megatron_microbatches_start(self, step: MegatronStep) -> None:
        """Give every microbatch `reference_logprobs`, float32 [R, S], on the last stage."""
        started = time.perf_counter()
        microbatches = list(step.data)
        step.data = iter(microbatches)
        with self.swapped_in():
            scores = score(step.pipeline, microbatches, entropies=self.evaluate)
        for microbatch, answer in zip(microbatches, scores or (), strict=scores is not None):
            microbatch["reference_logprobs"] = answer.logprobs
        means = _means(microbatches, scores) if self.evaluate else {}
        seconds = time.perf_counter() - started
        numbers = {**means, "reference_distance": self.shadow.distance, "reference_seconds": seconds}
        step.trainer.datamodule.current_step.report(numbers)

    def on_train_batch_end(self, *_: Any) -> None:
        """Follow the policy, unless the optimizer has skipped the step."""
        if not self._updated:
            return
        self.updates += 1
        if self.settings["mode"] == "ema":
            self.shadow.follow(self.settings["beta"])
        elif self.settings["mode"] == "hard" and self.updates % self.settings["every"] == 0:
            self.shadow.follow(0.0)

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within, the model is the reference: for scoring, or for handing its weights to a sampler."""
        with self.shadow.swapped_in():
            yield

    def sharded_state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """{parameter name: Megatron ShardedTensor of the fp32 reference}, keys `reference.*`, for saving and loading.

        Args:
            model: the Megatron model under all wrappers.
        """
        return self.shadow.sharded_state_dict(model)

    def load_shadow(self, tensors: Mapping[str, Tensor]) -> None:
        """After `on_fit_start`: take what Megatron's load of `sharded_state_dict` returns, {parameter name: tensor}."""
        self.shadow.load(tensors)

    def state_dict(self) -> dict[str, Any]:
        """Lightning's hook: settings and counter; the tensors travel by `sharded_state_dict`."""
        return {**self.settings, "updates": self.updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Lightning's hook; ValueError if the checkpoint's reference was kept in another way."""
        for name, value in self.settings.items():
            if state_dict[name] != value:
                raise ValueError(f"reference.{name}={value!r}: the checkpoint's reference has {state_dict[name]!r}")
        self.updates = state_dict["updates"]


def _means(microbatches: list[dict[str, Tensor]], scores: list[TokenScores] | None) -> dict[str, float]:
    """Mean log-prob and entropy over the action tokens of the step, on every rank. A collective over all ranks."""
    sums = torch.zeros(3, dtype=torch.float64, device=platform.device())
    if scores is not None and parallel_state.get_tensor_model_parallel_rank() == 0:
        for microbatch, answer in zip(microbatches, scores, strict=True):
            mask = microbatch["target_mask"]
            values = (mask, *(torch.where(mask, own, 0) for own in (answer.logprobs, answer.entropies)))
            sums += torch.stack([value.double().sum() for value in values])
    torch.distributed.all_reduce(sums)
    count, logprob, entropy = sums.tolist()
    return {"reference_logprob": logprob / max(count, 1), "reference_entropy": entropy / max(count, 1)}
