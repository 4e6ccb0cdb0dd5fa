"""What a run shows: numbers and trajectories of each step, to files, to Lightning's loggers, to the terminal."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state

from nemo_flashrl import platform
from nemo_flashrl.callbacks.weight_refit import WeightRefitCallback
from nemo_flashrl.data.datamodule import RolloutDataModule
from nemo_flashrl.data.rank_step import RankStep
from nemo_flashrl.metrics.monitors import Monitors
from nemo_flashrl.metrics.progress import Progress
from nemo_flashrl.metrics.step import group_metrics, policy_metrics, trajectory_metrics
from nemo_flashrl.metrics.trajectory_log import readable, trajectory_row
from nemo_flashrl.run.jsonl import append_json_line, append_json_lines, read_metrics
from nemo_flashrl.weights.shards import unwrap

LOWEST_ACTION_SHARE = 0.05
LEFT_OUT = {  # the metric that counts them -> why, and the remedy
    "dropped_no_code": "no action has fenced code, set selection.tokens=actions",
    "dropped_malformed": "every one has a malformed action, set selection.malformed=keep",
    "dropped_shaping": "every one is below selection.shaping_at_least, lower it",
}

logger = logging.getLogger(__name__)


class RLMetricsCallback(pl.Callback):
    """Writes what a run shows, on global rank 0; the other ranks hand over what only they know.

    Args:
        output: the run's folder, made where it is missing; gets `metrics.jsonl`, `trajectories.jsonl` and
            `samples.jsonl`.
        data: where the step's trajectories and the collector's numbers are.
        refit: whose time and driver's faults are reported beside the step's.
        tokenizer: turns samples into text.
        monitors: what watches these numbers; None: nothing.
        log_trajectories: full trajectories written as text each step.
    """

    def __init__(
        self,
        output: str | Path,
        data: RolloutDataModule,
        refit: WeightRefitCallback,
        tokenizer: Any,
        *,
        monitors: Monitors | None = None,
        log_trajectories: int = 4,
    ) -> None:
        self.output = Path(output)
        self.data = data
        self.refit = refit
        self.tokenizer = tokenizer
        self.monitors = Monitors({}) if monitors is None else monitors
        self.log_trajectories = log_trajectories
        self.constants: dict[str, float] = {}  # what holds for the whole run
        self._sums: dict[str, float] | None = None
        self._step_started = self._learning_rate = 0.0
        self._progress: Progress | None = None
        self._action_share, self._left_out = ActionShareWarning(), LeftOutWarning()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The writing rank alone has a terminal."""
        if trainer.is_global_zero:
            self.output.mkdir(parents=True, exist_ok=True)
            self._progress = Progress(trainer.max_steps)
            self.constants.update(active_features(pl_module))
            history = self.output / "metrics.jsonl"
            self.monitors.replay(read_metrics(history) if history.exists() else [])

    def on_megatron_microbatches_start(self, **_: Any) -> None:
        """The batch is there."""
        self._wait_for("training")

    def on_megatron_reduce_microbatches_end(self, reduced: dict[str, torch.Tensor], **_: Any) -> None:
        """NeMo calls it on the last pipeline stage, the only one that knows the loss."""
        self._sums = {name: float(value) for name, value in reduced.items()}
        self._wait_for("optimizer step and weight sync")

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """The clock of the whole step, rollout included; and the rate, which the schedule moves on before its end."""
        self._step_started = time.perf_counter()
        self._learning_rate = trainer.optimizers[0].param_groups[0]["lr"]
        self._wait_for("rollouts")

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Comes after the refit callback, whose seconds belong to this step."""
        sums, memory = self._from_last_stage(), _memory_of_all_ranks()
        if not trainer.is_global_zero:
            return
        step, number = self.data.current_step, trainer.global_step
        record = {
            **self.constants,
            "step": number,
            **step.metrics,
            **trajectory_metrics(step.batch.trajectories, number - 1),
            **group_metrics(step.batch.trajectories, step.advantages),
            **policy_metrics(sums),
            "grad_norm": float(trainer.callback_metrics.get("grad_norm", float("nan"))),
            "learning_rate": self._learning_rate,
            **self.refit.driver.faults(),
            **self._probe(),
            **self._times(step),
            **memory,
        }
        # Whom a gate rejects is known on the ranks that hold it: taken off in proportion.
        trained = record["effective_samples"] * record.get("gate_acceptance", 1.0)
        record["effective_fraction"] = trained / len(step.batch.trajectories)
        record |= self.monitors.see(record)
        self._write(record, step, trainer)
        self._progress.step_done(record)
        self._action_share.see(number, record["action_token_share"])
        self._left_out.see(number, record)

    def _probe(self) -> dict[str, float]:
        probe = self.refit.probe
        return {} if probe is None or probe.largest is None else {"weight_sync_logprob_difference": probe.largest}

    def _times(self, step: RankStep) -> dict[str, float]:
        seconds = time.perf_counter() - self._step_started
        tokens = sum(len(t.token_ids) for t in step.batch.trajectories)
        others = step.metrics["rollout_seconds"] + self.refit.seconds + step.metrics.get("evaluating_seconds", 0.0)
        return {
            "step_seconds": seconds,
            "refit_seconds": self.refit.seconds,
            "train_seconds": seconds - others,
            "tokens_per_second": tokens / seconds,
        }

    def _write(self, record: dict[str, Any], step: RankStep, trainer: pl.Trainer) -> None:
        number, batch = record["step"], step.batch
        rows = [
            trajectory_row(trajectory, number, number - 1, advantage)
            for trajectory, advantage in zip(batch.trajectories, step.advantages, strict=True)
        ]
        append_json_lines(self.output / "trajectories.jsonl", rows)
        shown = zip(rows, batch.trajectories[: self.log_trajectories], strict=False)
        samples = [{**row, **readable(trajectory, self.tokenizer, row["advantage"])} for row, trajectory in shown]
        append_json_lines(self.output / "samples.jsonl", samples)
        append_json_line(self.output / "metrics.jsonl", record)
        numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=number)

    def _wait_for(self, what: str) -> None:
        if self._progress is not None:
            self._progress.wait_for(what)

    def _from_last_stage(self) -> dict[str, float]:
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() == 1:
            return self._sums
        box = [self._sums]
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        torch.distributed.broadcast_object_list(box, src=last, group=group)
        return box[0]


def _memory_of_all_ranks() -> dict[str, float]:
    """The fullest rank's, counter by counter."""
    use = platform.memory_use()
    values = torch.tensor(list(use.values()), dtype=torch.float32, device=platform.device())
    torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.MAX)
    return dict(zip(use, values.tolist(), strict=True))


def active_features(model: torch.nn.Module) -> dict[str, float]:
    """1 or 0 for recomputation, and on a GPU for flash attention, of this pipeline stage's layers in training.

    Transformer Engine chooses its kernel at run time; both of the fast ones can be forbidden by the environment.
    """
    decoder = unwrap(model).decoder
    numbers = {"recompute_active": float(bool(decoder.config.recompute_granularity) and decoder.training)}
    if platform.has_gpu() and len(decoder.layers):
        attention = type(decoder.layers[0].self_attention.core_attention).__name__
        allowed = any(os.environ.get(name, "1") != "0" for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN"))
        numbers["flash_attention_active"] = float(attention == "TEDotProductAttention" and allowed)
    return numbers


class ActionShareWarning:
    """Looks at each step's share of action tokens and warns at the first that is too low."""

    def __init__(self) -> None:
        self._said = False

    def see(self, step: int, share: float) -> None:
        """`share`: action tokens / all tokens of the step's trajectories."""
        if self._said or share >= LOWEST_ACTION_SHARE:
            return
        self._said = True
        logger.warning(
            "step %d: %.1f%% of the tokens are actions (under %.0f%%), the rest is context without gradient: shorten "
            "observations in the environment, truncate them (rollout.max_observation_tokens), or summarise them "
            "(rollout.summarizer)",
            step,
            100 * share,
            100 * LOWEST_ACTION_SHARE,
        )


class LeftOutWarning:
    """Warns at the first step that trains nothing because `selection` leaves every trajectory out."""

    def __init__(self) -> None:
        self._said = False

    def see(self, step: int, record: Mapping[str, Any]) -> None:
        """`record`: the step's metrics."""
        if self._said or record.get("left_out_share", 0.0) < 1:
            return
        self._said = True
        counts = [f"{name} {record[name]:.0f}" for name in LEFT_OUT if record.get(name)]
        reasons = "; ".join(LEFT_OUT[name] for name in LEFT_OUT if record.get(name))
        logger.warning(
            "step %d: every trajectory is left out of the loss (%s), nothing is trained: %s; read samples.jsonl",
            step,
            ", ".join(counts),
            reasons,
        )
