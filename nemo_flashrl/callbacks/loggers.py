"""Where Lightning sends a step's numbers, beside `metrics.jsonl`."""

from __future__ import annotations

from dataclasses import asdict

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from nemo_flashrl.config import RunConfig


def run_loggers(config: RunConfig) -> list[Logger]:
    """TensorBoard in the run's folder; Weights & Biases when `trainer.wandb_project` names a project."""
    loggers: list[Logger] = [TensorBoardLogger(config.output, name="tensorboard", version="")]
    if config.trainer.wandb_project:
        loggers.append(WandbLogger(project=config.trainer.wandb_project, save_dir=config.output, config=asdict(config)))
    return loggers
