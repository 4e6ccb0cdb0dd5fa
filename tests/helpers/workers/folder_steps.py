"""Ranks that have read the same output folder at different times."""

from __future__ import annotations

import os

import torch

from nemo_flashrl.callbacks.checkpoint import check_agreed
from nemo_flashrl.config import load
from nemo_flashrl.run.folder import RunFolder


def main(*steps: int) -> None:
    torch.distributed.init_process_group("gloo")
    config = load("rehearsal", ["output=runs/first", "model.path=here"])
    check_agreed(RunFolder(config, {}, step=steps[0]))
    try:
        check_agreed(RunFolder(config, {}, step=steps[int(os.environ["RANK"])]))
    except ValueError as refusal:
        print(refusal)
