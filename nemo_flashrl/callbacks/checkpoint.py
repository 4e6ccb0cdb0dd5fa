"""When a run saves itself, what it keeps, and how it is asked to stop.

Beside weights, optimizer, scheduler and counters a checkpoint holds every rank's random generators, and the tensors of
callbacks that offer `sharded_state_dict(model)` and `load_shadow(dict)`. Lightning's checkpoint dictionary carries
them; Megatron writes what is sharded in parallel and reads it back at any parallel sizes.
"""

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
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from nemo.lightning.io.pl import ckpt_to_weights_subdir
from torch.distributed.checkpoint.api import CheckpointException

from nemo_flashrl import platform
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
from nemo_flashrl.weights.shards import unwrap


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


def add_to_checkpoint(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
    """Put what is described at the top of this file into what is about to be written; a collective over all ranks."""
    data = type(trainer.datamodule).__qualname__
    # The data module's state is known on rank 0 alone; what is not sharded has to be the same on all ranks.
    checkpoint[data] = trainer.strategy.broadcast(checkpoint.get(data))
    checkpoint["layout"] = _layout()
    checkpoint["random_generators"] = _of_this_rank(platform.random_state())
    checkpoint["sharded_callbacks"] = _sharded_callbacks(trainer)


def take_from_checkpoint(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """Hand callbacks what they saved; returns this rank's generators, None where the parallel sizes have changed."""
    for key, tensors in checkpoint.get("sharded_callbacks", {}).items():
        next(c for c in trainer.callbacks if c.state_key == key).load_shadow(tensors)
    return checkpoint.get("random_generators")


class RunStateIO(_WrappingCheckpointIO):
    """NeMo's checkpoint IO, asking on load for what `add_to_checkpoint` has put beside NeMo's own."""

    def __init__(self, checkpoint_io: Any, trainer: pl.Trainer) -> None:
        super().__init__(checkpoint_io)
        self.trainer = trainer

    def load_checkpoint(self, path: Any, sharded_state_dict: Any = None, **options: Any) -> dict[str, Any]:
        """As NeMo's; generators of other parallel sizes belong to no rank here and are left out."""
        common = dist_checkpointing.load_common_state_dict(str(ckpt_to_weights_subdir(path, is_saving=False)))
        sharded_state_dict["sharded_callbacks"] = _sharded_callbacks(self.trainer)
        if common["layout"] == _layout():
            sharded_state_dict["random_generators"] = _of_this_rank(None)
        return self.checkpoint_io.load_checkpoint(path, sharded_state_dict=sharded_state_dict, **options)


def _sharded_callbacks(trainer: pl.Trainer) -> dict[str, Any]:
    model = unwrap(trainer.lightning_module)
    return {c.state_key: c.sharded_state_dict(model) for c in trainer.callbacks if hasattr(c, "sharded_state_dict")}


def _of_this_rank(state: Any) -> ShardedObject:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    return ShardedObject("random_generators", state, (world,), (rank,))


def _layout() -> dict[str, int]:
    return {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "processes": torch.distributed.get_world_size(),
    }
