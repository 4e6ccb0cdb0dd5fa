"""Steps of FlashREINFORCE with a value head on trajectories made before; writes states, values and credit."""

from __future__ import annotations

import os
from pathlib import Path

import lightning.pytorch as pl
import torch

from nemo_flashrl.algorithms.flash_reinforce import FlashReinforce, FlashReinforceSettings
from nemo_flashrl.build import build_data, build_model, build_trainer
from nemo_flashrl.callbacks import value_baseline
from nemo_flashrl.config import load
from nemo_flashrl.preflight.prepare import Parts
from workers.parity import Driver


class Record(pl.Callback):
    """After the value head's callback: what the microbatches of this rank carry."""

    def __init__(self) -> None:
        self.steps: list[dict] = []

    def on_megatron_microbatches_start(self, step) -> None:
        microbatches = list(step.data)
        step.data = iter(microbatches)
        last = step.trainer.datamodule.current_step
        columns = [(m["trajectory"].tolist(), m["advantages"].tolist()) for m in microbatches]
        pairs = [pair for places, advantages in columns for pair in zip(places, advantages, strict=True)]
        self.steps.append({"trained": pairs, "metrics": dict(last.metrics), "advantages": last.advantages})


def main(model: Path, trajectories: Path, out: Path, vocab_size: int, *overrides: str) -> None:
    config = load("rehearsal", [f"output={out.parent / 'unused'}", f"model.path={model}", *overrides])
    algorithm = FlashReinforce(FlashReinforceSettings(delta=float("inf")))
    parts = Parts(algorithm, object, None, [], None, vocab_size, data_parallel=1)
    driver = Driver(trajectories) if os.environ["RANK"] == "0" else None
    states, original = [], value_baseline.ValueHead.predict

    def predict(head, given):
        states.append(given)
        return original(head, given)

    value_baseline.ValueHead.predict = predict
    record, callbacks = Record(), value_baseline.value_baseline(config.value_head)
    build_run = build_trainer(config, [*callbacks, record])
    build_run.fit(build_model(config, parts), datamodule=build_data(config, parts, driver))
    everyone = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, record.steps)
    if os.environ["RANK"] == "0":
        head = callbacks[0].state_dict()
        torch.save({"ranks": everyone, "states": states, "head": head}, out)
