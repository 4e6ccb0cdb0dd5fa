"""Training processes of one machine, started and ended together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_flashrl.diagnostics.progress import rewrite

GRACE_SECONDS = 10.0
LAST_LINES = 30
PROGRESS = "step "


def run_training(
    config: str, overrides: Sequence[str], processes: int, environment: Mapping[str, str], log: Path
) -> None:
    """Run `flashrl train` in `processes` processes and wait for them.

    All they say goes to `log`; the lines of progress are shown as they come. They form a process group of their own,
    which is ended as a whole when this process is interrupted.

    Raises:
        RuntimeError: a process failed; the message holds the end of the log.
    """
    command = [sys.executable, "-m"]
    if processes > 1:
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    command += ["nemo_flashrl.cli", "train", config, *overrides]
    group = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    live = sys.stdout.isatty()
    last: deque[str] = deque(maxlen=LAST_LINES)
    try:
        with log.open("w") as file:
            for line in group.stdout:
                file.write(line)
                last.append(line)
                if line.startswith(PROGRESS):
                    print(rewrite(line.rstrip("\n")) if live else f"  {line}", end="", flush=True)
        code = group.wait()
        if live:
            print()
    finally:
        end_group(group)
    if code != 0:
        raise RuntimeError(f"training ended with exit code {code}; the whole log is in {log}\n{''.join(last)}")


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
