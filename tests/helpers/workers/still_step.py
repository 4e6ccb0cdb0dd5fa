"""One step of the real trainer, then its export as a Hugging Face folder."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from nemo_flashrl.weights.hf_folder import write_hf_folder
from nemo_flashrl.weights.shards import stream_hf_tensors, unwrap
from workers.parity import Driver, make_run


def main(
    model_folder: Path, trajectories: Path, target: Path, vocab_size: int, *overrides: str, learning_rate: float
) -> None:
    """`target` gets what inference would use; beside it, `.base` gets the weights without adapters."""
    first = os.environ["RANK"] == "0"
    driver = Driver(trajectories) if first else None
    trainer, model, data = make_run(model_folder, target, vocab_size, driver, [], overrides)
    model.optim.config.lr = learning_rate
    trainer.fit(model, datamodule=data)
    for value, folder in ((None, target), (torch.Tensor.detach, target.with_suffix(".base"))):
        stream = stream_hf_tensors(unwrap(model), vocab_size, value)
        if first:
            write_hf_folder(stream, model_folder, folder)
        for _ in stream:
            pass
