"""A run whose model has dropout, with the check that every run has."""

from __future__ import annotations

import os
from pathlib import Path

from nemo_flashrl.callbacks import PassAgreementCallback
from workers.parity import Driver, make_run


def main(model_folder: Path, trajectories: Path, out: Path, vocab_size: int, *overrides: str) -> None:
    callbacks = [PassAgreementCallback()]
    driver = Driver(trajectories) if os.environ["RANK"] == "0" else None
    trainer, model, data = make_run(model_folder, out, vocab_size, driver, callbacks, overrides, dropout=0.1)
    try:
        trainer.fit(model, datamodule=data)
    except ValueError as refusal:
        assert trainer.global_step == 0
        out.with_name(f"{out.name}{trainer.global_rank}").write_text(str(refusal))
