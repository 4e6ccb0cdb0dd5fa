"""When a run saves itself, what it keeps, and how it is asked to stop."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import nemo.lightning as nl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint as LightningCheckpoint
from lightning.pytorch.loggers import WandbLogger
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from nemo_flashrl import platform
from nemo_flashrl.callbacks.checkpoint_state import RunStateIO, add_to_checkpoint, take_from_checkpoint
from nemo_flashrl.engines.factory import server_versions
from nemo_flashrl.metrics.monitors import Monitors
from nemo_flashrl.run.folder import (
    Interrupted,
    NotSaved,
    Preempted,
    RunFolder,
    StoppedByMonitor,
    complete_checkpoints,
    record_files,
)
from nemo_flashrl.run.record import WANDB_ID, record_versions, versions


class RunCheckpoint(nl.ModelCheckpoint):
    """NeMo's checkpoint callback for a run that resumes exactly.

    It comes last of all callbacks: what they do after an optimizer step belongs to the state of that step. A folder
    is marked as unfinished (NeMo's marker file) while it is written or removed; an old checkpoint goes when a newer
    one is complete. On SIGTERM or Ctrl-C to any rank, all stop after the current step and save; where it finds the
    collecting rank waiting for a batch, before that step. A second Ctrl-C ends the process at once.

    Args:
        folder: where, and which checkpoint the run resumes from.
        every_steps: optimizer steps between two checkpoints, and one at the end; 0 saves on SIGTERM alone.
        keep: complete checkpoints that stay.
        monitors: what may end the run; the collecting rank's has seen the step's metrics before this callback.
        stop_collecting: ends the wait for a batch; of the collecting rank.
    """

    def __init__(
        self,
        folder: RunFolder,
        monitors: Monitors,
        *,
        every_steps: int,
        keep: int,
        stop_collecting: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(
            dirpath=str(folder.checkpoints.absolute()),
            filename="{step}",
            monitor=None,
            verbose=False,
            save_last=False,
            save_top_k=-1,
            every_n_train_steps=every_steps,
            save_optim_on_train_end=True,
            always_save_context=False,
            save_context_on_train_end=False,
            enable_version_counter=False,
        )
        self.folder = folder
        self.monitors = monitors
        self.every_steps = every_steps
        self.keep = keep
        self.stop_collecting = stop_collecting
        self.asked_to_stop = 0  # 0: no; else the signal that did, or 1 for a monitor
        self._previous_handlers: dict[int, Any] = {}
        self._random_state: dict[str, Any] | None = None
        self._last_global_step_saved = folder.step

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """All ranks have read the folder before this. NeMo removes torn checkpoints, which may free a full disk."""
        check_agreed(self.folder)
        super().setup(trainer, pl_module, stage)
        if trainer.is_global_zero:
            self.folder.begin()
            for logger in trainer.loggers:
                if isinstance(logger, WandbLogger):
                    (self.folder.path / WANDB_ID).write_text(f"{logger.version}\n")
        trainer.strategy.checkpoint_io = RunStateIO(trainer.strategy.checkpoint_io, trainer)
        self._handle(signal.SIGTERM, self._on_early_signal)  # Lightning's calls it too

    def _on_early_signal(self, *_: Any) -> None:
        """Nothing is to be saved yet, and what is waited for, servers say, may never come."""
        raise Preempted("stopped by SIGTERM before its first step")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Listen for SIGTERM in place of Lightning, which would end the process without a checkpoint.

        NeMo's own method is left out: it moves files about in NeMoLogger's folder, which this run has not.
        """
        LightningCheckpoint.on_train_start(self, trainer, pl_module)
        self._handle(signal.SIGTERM, self._on_signal)
        self._handle(signal.SIGINT, self._on_interrupt)
        if trainer.is_global_zero:  # the servers have taken the weights: they can be asked
            found = versions() | server_versions(self.folder.config.rollout)
            record_versions(self.folder.path, self.folder.step, found)

    def _handle(self, number: int, handler: Callable[..., None]) -> None:
        previous = signal.signal(number, handler)
        self._previous_handlers.setdefault(number, previous)

    def _on_interrupt(self, number: int, *_: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # of the next one, whatever this process then waits for
        if os.environ.get("RANK", "0") == "0":  # written past Python's buffers, which the signal may have found in use
            os.write(2, b"\nCtrl-C: stopping after this step with a checkpoint; a second one ends the run at once\n")
        self._on_signal(number)

    def _on_signal(self, number: int, *_: Any) -> None:
        self.asked_to_stop = max(self.asked_to_stop, number)
        if self.stop_collecting is not None:
            self.stop_collecting()

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """The last moment before a resumed step draws random numbers; setting up has drawn some."""
        if self._random_state is not None:
            platform.set_random_state(self._random_state)
            self._random_state = None

    def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        """Save when it is due; stop when any rank has been asked to, or a monitor says so before the last step."""
        super().on_train_batch_end(trainer, *arguments)
        warned = bool(self.monitors.reason) and trainer.global_step < trainer.max_steps
        asked = torch.tensor(max(self.asked_to_stop, int(warned)))
        torch.distributed.all_reduce(asked, op=torch.distributed.ReduceOp.MAX, group=platform.object_group())
        if asked:
            self.asked_to_stop, trainer.should_stop = int(asked), True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The last step's checkpoint, unless it is there already."""
        stopped = trainer.should_stop  # what all ranks know; a signal since the last step comes too late
        if (self.every_steps or stopped) and not self._should_skip_saving_checkpoint(trainer):
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        if trainer.is_global_zero and stopped and self.asked_to_stop == signal.SIGTERM and not self.monitors.reason:
            self.folder.preempted.touch()

    def raise_stop(self, trainer: pl.Trainer) -> None:
        """After a fit that has ended before its last step: StoppedByMonitor, Interrupted or Preempted, as rank 0's."""
        where = f"after step {trainer.global_step} of {trainer.max_steps}"
        reason, asked = trainer.strategy.broadcast((self.monitors.reason, self.asked_to_stop))
        if reason:
            raise StoppedByMonitor(f"stopped by monitors {where}: {reason}")
        if asked == signal.SIGINT:
            raise Interrupted(f"stopped by Ctrl-C {where}")
        raise Preempted(f"stopped by SIGTERM {where}")

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict) -> None:
        """Lightning's hook, on every rank."""
        add_to_checkpoint(trainer, checkpoint)

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict) -> None:
        """Lightning's hook, on every rank, after the weights."""
        self._random_state = take_from_checkpoint(trainer, checkpoint)

    def _monitor_candidates(self, trainer: pl.Trainer) -> dict[str, torch.Tensor]:
        """NeMo logs `step` before the optimizer counts it."""
        return {**super()._monitor_candidates(trainer), "step": torch.tensor(trainer.global_step)}

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        try:
            super()._save_checkpoint(trainer, filepath)  # ends with a barrier
            if trainer.is_global_zero:
                record_files(complete_checkpoints(self.folder.checkpoints)[trainer.global_step])
        except (OSError, CheckpointException, CheckpointingException) as error:  # the disk is not ours
            last = max(complete_checkpoints(self.folder.checkpoints), default=None)
            left = (
                "no complete checkpoint is left"
                if last is None
                else f"the checkpoint of step {last} is complete and is kept"
            )
            free = shutil.disk_usage(self.dirpath).free / 2**20
            raise NotSaved(
                f"the checkpoint of step {trainer.global_step} could not be written to {self.dirpath}, which has "
                f"{free:.0f} MiB free ({_reason(error)}); {left}"
            ) from error
        self._remove_old(trainer)

    def _remove_old(self, trainer: pl.Trainer) -> None:
        complete = complete_checkpoints(Path(self.dirpath)) if trainer.is_global_zero else {}
        old = [str(complete[step]) for step in sorted(complete)[: -self.keep]]
        for path in trainer.strategy.broadcast(old):
            self._remove_checkpoint(trainer, path)


def check_agreed(folder: RunFolder) -> None:
    """ValueError on all ranks where they have not all read the same; a collective.

    One that was quick has read the folder before the run there ended and freed it, or its file system answers late.
    """
    steps = [0] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(steps, folder.step, group=platform.object_group())
    if min(steps) < max(steps):
        raise ValueError(
            f"output={folder.config.output!r}: its newest checkpoint is of step {max(steps)} on some ranks and of "
            f"step {min(steps)} on others: rerun"
        )


def _reason(error: BaseException) -> str:
    """Torch wraps the errors of all ranks in one."""
    failures = getattr(error, "failures", None) or {}  # rank -> (error, traceback)
    first = next(iter(failures.values()), (error, None))[0]
    return f"{type(first).__name__}: {first}"
