"""`flashrl train`, as torchrun starts it."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path

from nemo_flashrl.cli import main as flashrl


def main(
    *arguments: str, strike: tuple[int, int, Path, str, float] | None = None, file_bytes: int | None = None
) -> int:
    """The command's exit code.

    `strike` is (rank, signal, folder, pattern, seconds): that rank gets the signal so long after a file that matches
    is there. `file_bytes` bounds every file that is written, as a full disk does.
    """
    if strike is not None and int(os.environ["RANK"]) == strike[0]:
        _strike_from_outside(*strike[1:])
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    return flashrl(["train", *arguments])


def _strike_from_outside(number: int, folder: Path, pattern: str, seconds: float) -> None:
    """Another process sends the signal: it comes in the middle of whatever this one does."""
    target = os.getpid()
    if os.fork():
        return
    signal.alarm(600)
    while os.getppid() == target:
        if next(folder.glob(pattern), None) is not None:
            time.sleep(seconds)
            os.kill(target, number)
            break
        time.sleep(0.0002)
    os._exit(0)
