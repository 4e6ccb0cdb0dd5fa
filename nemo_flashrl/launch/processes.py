"""Training processes of one machine, started and ended together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from nemo_flashrl.launch.parent import end_with_parent
from nemo_flashrl.metrics.progress import rewrite

GRACE_SECONDS = 10.0
LAST_LINES = 30
PROGRESS = "step "


def run_training(
    config: str, overrides: Sequence[str], processes: int, environment: Mapping[str, str], log: Path
) -> None:
    """Run `flashrl train` in `processes` processes and wait for them.

    All they say goes to `log`; the lines of progress are shown as they come. They form a process group of their own,
    which is ended as a whole when this process is interrupted (Ctrl-C, SIGTERM) or killed. Main thread only.

    Raises:
        RuntimeError: a process failed; the message holds the end of the log.
        SystemExit: SIGTERM came.
    """
    train = ["nemo_flashrl.cli", "train", config, *overrides]
    live = sys.stdout.isatty()
    last: deque[str] = deque(maxlen=LAST_LINES)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_sigterm_raises())
        if processes > 1:  # torchrun never removes the folder of its own that it makes where none is named
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="flashrl-", ignore_cleanup_errors=True))
            torchrun = ["torch.distributed.run", "--standalone", "--log-dir", folder]
            train = [*torchrun, "--nproc-per-node", str(processes), "-m", *train]
        file = stack.enter_context(log.open("w"))
        group = stack.enter_context(_group([sys.executable, "-m", *train], {**os.environ, **environment}))
        for line in group.stdout:
            file.write(line)
            last.append(line)
            if line.startswith(PROGRESS):
                print(rewrite(line.rstrip("\n")) if live else f"  {line}", end="", flush=True)
        code = group.wait()
        if live:
            print()
    if code != 0:
        raise RuntimeError(f"training ended with exit code {code}; the whole log is in {log}\n{''.join(last)}")


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM unwinds the stack as Ctrl-C does; by default it would end this process and leave the group running."""

    def leave(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _group(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen]:
    group = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=end_with_parent,
    )
    try:
        yield group
    finally:
        end_group(group)


def end_group(group: subprocess.Popen) -> None:
    """End every process of a group: SIGTERM, then SIGKILL to what is left after a grace time or at a second signal."""
    with contextlib.suppress(ProcessLookupError):
        try:
            os.killpg(group.pid, signal.SIGTERM)
            group.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            os.killpg(group.pid, signal.SIGKILL)
