"""A process and the one that started it: it ends with it, however that ended, and tells it why it failed."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import time

_PR_SET_PDEATHSIG = 1  # Linux: a signal when the process that started us is gone


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Ask the kernel for signal `number` at the parent's end; Linux alone. Called in the child, `preexec_fn` too."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before the kernel knew
        os.kill(os.getpid(), number)


def tell_torchrun(reason: str) -> None:
    """Let torchrun end its own report, which comes last on the screen, with `reason`; nothing without torchrun."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with contextlib.suppress(OSError), open(file, "w", encoding="utf-8") as report:
            json.dump({"message": f"\n{reason}", "timestamp": str(int(time.time()))}, report)
