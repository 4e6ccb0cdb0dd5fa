"""Training processes of one machine, started and ended together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

GRACE_SECONDS = 10.0


def run_training(config: str, overrides: Sequence[str], processes: int, environment: Mapping[str, str]) -> None:
    """Run `flashrl train` in `processes` processes and wait for them.

    They form a process group of their own, which is ended as a whole when this process is interrupted.

    Raises:
        RuntimeError: a process failed; its output is on the terminal.
    """
    command = [sys.executable, "-m"]
    if processes > 1:
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    command += ["nemo_flashrl.cli", "train", config, *overrides]
    group = subprocess.Popen(command, env={**os.environ, **environment}, start_new_session=True)
    try:
        code = group.wait()
    finally:
        end_group(group)
    if code != 0:
        raise RuntimeError(f"training ended with exit code {code}")


def end_group(group: subprocess.Popen) -> None:
    """End every process of a group: SIGTERM, then SIGKILL to what is left after a grace time."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(group.pid, number)
        except ProcessLookupError:
            return
        try:
            group.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            continue
