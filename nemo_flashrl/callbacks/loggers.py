"""Where Lightning sends a step's numbers, beside `metrics.jsonl`."""

from __future__ import annotations

from dataclasses import asdict

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from nemo_flashrl.config import RunConfig


def run_loggers(config: RunConfig, first_step: int = 1) -> list[Logger]:
    """TensorBoard in the run's folder; Weights & Biases when `trainer.wandb_project` names a project.

    `first_step` is the first that this process will log: TensorBoard hides what an earlier one logged from there on.
    """
    board = TensorBoardLogger(config.output, name="tensorboard", version="", purge_step=first_step)
    loggers: list[Logger] = [board]
    if config.trainer.wandb_project:
        loggers.append(WandbLogger(project=config.trainer.wandb_project, save_dir=config.output, config=asdict(config)))
    return loggers
