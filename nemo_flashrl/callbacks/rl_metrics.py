"""One line of numbers a step: `metrics.jsonl`, Lightning's loggers, the terminal; and a few trajectories as text."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state

from nemo_flashrl.callbacks.weight_refit import WeightRefitCallback
from nemo_flashrl.data.datamodule import RolloutDataModule
from nemo_flashrl.diagnostics.metrics import append_json_line, policy_metrics, trajectory_metrics
from nemo_flashrl.records import Trajectory


class RLMetricsCallback(pl.Callback):
    """Writes what a run shows, on global rank 0; the other ranks hand over what only they know.

    Args:
        output: the run's folder.
        data: where the step's trajectories and the collector's numbers are.
        refit: whose time is reported beside the step's.
        tokenizer: turns logged trajectories into text.
        log_trajectories: how many a step.
        print_every: steps between lines on the terminal.
    """

    def __init__(
        self,
        output: Path,
        data: RolloutDataModule,
        refit: WeightRefitCallback,
        tokenizer: Any,
        *,
        log_trajectories: int = 4,
        print_every: int = 10,
    ) -> None:
        self.output = output
        self.data = data
        self.refit = refit
        self.tokenizer = tokenizer
        self.log_trajectories = log_trajectories
        self.print_every = print_every
        self._sums: dict[str, float] | None = None
        self._step_started = 0.0

    def on_megatron_reduce_microbatches_end(self, reduced: dict[str, torch.Tensor], **_: Any) -> None:
        """NeMo calls it on the last pipeline stage, the only one that knows the loss."""
        self._sums = {name: float(value) for name, value in reduced.items()}

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """The clock of the whole step, rollout included."""
        self._step_started = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Comes after the refit callback, whose seconds belong to this step."""
        sums = self._from_last_stage()
        if not trainer.is_global_zero:
            return
        step = self.data.last_step
        seconds = time.perf_counter() - self._step_started
        batch = step.batch
        tokens = sum(len(t.token_ids) for t in batch.trajectories)
        record = {
            "step": trainer.global_step,
            **step.metrics,
            **trajectory_metrics(batch.trajectories, trainer.global_step - 1),
            **policy_metrics(sums),
            "gradient_norm": float(trainer.callback_metrics.get("grad_norm", float("nan"))),
            "learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
            "refit_seconds": self.refit.seconds,
            "train_seconds": seconds - step.metrics["rollout_seconds"] - self.refit.seconds,
            "tokens_per_second": tokens / seconds,
        }
        append_json_line(self.output / "metrics.jsonl", record)
        for logger in trainer.loggers:
            logger.log_metrics(record, step=trainer.global_step)
        for trajectory in batch.trajectories[: self.log_trajectories]:
            append_json_line(self.output / "trajectories.jsonl", self._readable(trainer.global_step, trajectory))
        if trainer.global_step % self.print_every == 0 or trainer.global_step in (1, trainer.max_steps):
            sys.stdout.write(_progress_line(record, trainer.max_steps, seconds))
            sys.stdout.flush()

    def _from_last_stage(self) -> dict[str, float]:
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() == 1:
            return self._sums
        box = [self._sums]
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        torch.distributed.broadcast_object_list(box, src=last, group=group)
        return box[0]

    def _readable(self, step: int, trajectory: Trajectory) -> dict[str, Any]:
        """Tokens that the policy sampled stand in [brackets]."""
        pieces, start = [], 0
        mask = trajectory.action_mask
        for end in range(1, len(mask) + 1):
            if end == len(mask) or mask[end] != mask[start]:
                text = self.tokenizer.decode(trajectory.token_ids[start:end].tolist())
                pieces.append(f"[{text}]" if mask[start] else text)
                start = end
        return {
            "step": step,
            "prompt_index": trajectory.prompt_index,
            "reward": trajectory.reward,
            "end_reason": trajectory.end_reason,
            "turns": trajectory.turns,
            "oldest_version": trajectory.oldest_version,
            "info": trajectory.info,
            "text": " ".join(pieces),
        }


def _progress_line(record: dict[str, Any], steps: int, seconds: float) -> str:
    errors = f"  environment errors {n:.0f}" if (n := record["episodes_environment_error"]) else ""
    gate = f"  gate {record['gate_acceptance']:.2f}" if "gate_acceptance" in record else ""
    return (
        f"step {record['step']:>4}/{steps}  reward {record['reward_mean']:.3f}  success {record['success']:.3f}{gate}"
        f"  turns {record['turns']:.1f}  grad {record['gradient_norm']:.3f}  {seconds:.2f} s/step{errors}\n"
    )
