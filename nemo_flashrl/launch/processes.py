"""Training processes: of one machine, started and ended together; and ranks that `srun` started, one task a device."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import NoReturn

from nemo_flashrl.launch.parent import end_with_parent
from nemo_flashrl.metrics.progress import rewrite

FIRST_PORT, NUM_PORTS = 20000, 20000  # below the range that Linux hands out by itself
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


def adopt_tasks(environment: MutableMapping[str, str] = os.environ) -> None:
    """Fill in from Slurm's variables what torchrun would have said: RANK, WORLD_SIZE, MASTER_ADDR and their like.

    Nothing happens under torchrun, whose variables are there already, outside Slurm, or in a step of one task.

    Raises:
        ValueError: nodes run different numbers of tasks, which no parallel layout of ours can use.
    """
    if "RANK" in environment or int(environment.get("SLURM_STEP_NUM_TASKS", "1")) == 1:
        return
    per_node = tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
    if len(set(per_node)) != 1:
        raise ValueError(
            f"SLURM_STEP_TASKS_PER_NODE={environment['SLURM_STEP_TASKS_PER_NODE']!r}: every node must run the same "
            "number of tasks; set --ntasks-per-node"
        )
    # Of the step, not of the job: a heterogeneous job runs a step per group. A requeued job keeps its id and port.
    port = FIRST_PORT + int(environment["SLURM_JOB_ID"]) % NUM_PORTS
    environment.update(
        RANK=environment["SLURM_PROCID"],
        WORLD_SIZE=environment["SLURM_STEP_NUM_TASKS"],
        LOCAL_RANK=environment["SLURM_LOCALID"],
        LOCAL_WORLD_SIZE=str(per_node[0]),
        GROUP_RANK=environment["SLURM_NODEID"],
        MASTER_ADDR=hosts(environment["SLURM_STEP_NODELIST"])[0],
        TORCHELASTIC_RUN_ID=environment["SLURM_JOB_ID"],
    )
    environment.setdefault("MASTER_PORT", str(port))


def tasks_per_node(text: str) -> list[int]:
    """
    >>> tasks_per_node("8(x2),4")
    [8, 8, 4]
    """
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in found for _ in range(int(times or 1))]


def hosts(nodelist: str) -> list[str]:
    """Slurm's compressed list of host names, written out (`scontrol` is not there inside a container).

    >>> hosts("gpu[007-009,020],cpu1")
    ['gpu007', 'gpu008', 'gpu009', 'gpu020', 'cpu1']
    """
    return [name for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist) for name in _expanded(part)]


def _expanded(part: str) -> list[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    ranges, _, after = rest.partition("]")
    numbers = []
    for item in ranges.split(","):
        first, _, last = item.partition("-")
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1)]
    return [before + number + tail for number in numbers for tail in _expanded(after)]
