"""A checkpoint callback that listens in training, and two Ctrl-C."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

from nemo_flashrl.callbacks import RunCheckpoint
from nemo_flashrl.metrics.monitors import Monitors


def main() -> None:
    folder = SimpleNamespace(checkpoints=Path("none"), step=0)
    callback = RunCheckpoint(folder, Monitors({}), every_steps=0, keep=1)
    callback._handle(signal.SIGINT, callback._on_interrupt)
    os.kill(os.getpid(), signal.SIGINT)
    print("asked by", callback.asked_to_stop, flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("still here", flush=True)
