"""A process that ends with the one that started it, however that ended."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # Linux: a signal when the process that started us is gone


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Ask the kernel for signal `number` at the parent's end; Linux alone. Called in the child, `preexec_fn` too."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before the kernel knew
        os.kill(os.getpid(), number)
