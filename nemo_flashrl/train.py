"""From a configuration to a trained checkpoint.

prompts -> Collector (rollout/) -> Batch (records.py) -> RolloutDataModule (data/)
        -> PolicyModel + PolicyHead (models/) -> loss (algorithms/) -> optimizer step (NeMo, Megatron)
        -> WeightRefitCallback (callbacks/) -> live shards as HF names (weights/) -> engine (rollout/) -> prompts
"""

from __future__ import annotations

import gc
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_flashrl import platform
from nemo_flashrl.build import build_callbacks, build_data, build_driver, build_model, build_trainer
from nemo_flashrl.config import RunConfig
from nemo_flashrl.metrics.progress import logged
from nemo_flashrl.preflight.conflicts import report_conflicts
from nemo_flashrl.preflight.prepare import prepare
from nemo_flashrl.run.folder import RunFolder

if TYPE_CHECKING:
    import nemo.lightning as nl

    from nemo_flashrl.models import PolicyModel


def train(config: RunConfig) -> Path:
    """Run `config` in the processes that torchrun started; returns the exported Hugging Face folder.

    Raises ValueError for what the configuration cannot mean and AlreadyComplete where the run has ended, both before
    anything is written; Preempted after SIGTERM and StoppedByMonitor when a limit was reached, when all is saved.
    """
    parts = prepare(config, int(os.environ.get("WORLD_SIZE", "1")))
    output = Path(config.output)
    first = int(os.environ.get("RANK", "0")) == 0
    report_conflicts(config, parts.algorithm, shown=first)
    with parts.folder.held(by_this_rank=first), logged(output, int(os.environ.get("RANK", "0"))):
        platform.install()
        model = build_model(config, parts)
        driver = build_driver(config, parts) if first else None
        data = build_data(config, parts, driver)
        trainer = build_trainer(config, build_callbacks(config, parts, data, driver), parts.folder.step + 1)
        resume(trainer, parts.folder)
        gc.collect()
        gc.freeze()  # answers of servers are many small objects: each full collection over modules too takes .4 s
        try:
            trainer.fit(model, datamodule=data)
            if trainer.should_stop:
                trainer.checkpoint_callback.raise_stop(trainer)
            export_reference(config, model, trainer)
            export(config, model, output / "checkpoint")  # last: with it there, the run is complete
        except SystemExit as end:
            if isinstance(end.__context__, KeyboardInterrupt):  # Lightning turns Ctrl-C into exit code 1
                raise end.__context__ from None
            raise
        finally:
            gc.unfreeze()  # for a caller who trains again
            if driver is not None:
                driver.close()
    return output / "checkpoint"


def resume(trainer: nl.Trainer, folder: RunFolder) -> None:
    """Let `fit` start from the folder's newest complete checkpoint, if it has one."""
    import nemo.lightning as nl

    if folder.checkpoint is not None:
        nl.AutoResume(resume_from_path=str(folder.checkpoint)).setup(trainer)


def export(config: RunConfig, model: PolicyModel, target: Path) -> None:
    """Write the policy as a Hugging Face folder; every rank takes part."""
    from nemo_flashrl.weights.hf_folder import run_card

    model.save_hf_folder(target, config.model.path, run_card(asdict(config), config.trainer.steps))


def export_reference(config: RunConfig, model: PolicyModel, trainer: nl.Trainer) -> None:
    """Write the reference beside the policy, to be generated from, where it is evaluated."""
    from nemo_flashrl.callbacks import EMAReferenceCallback

    for callback in trainer.callbacks:
        if isinstance(callback, EMAReferenceCallback) and callback.evaluate:
            with callback.swapped_in():
                export(config, model, Path(config.output) / "reference")
