"""However a command that trains in processes of its own ends, they end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import write_model

LONG = 60.0
COMMAND = """
import sys
from pathlib import Path
from nemo_flashrl.launch.processes import run_training
sys.executable = sys.argv[1]  # what stands for `python -m nemo_flashrl.cli train`
run_training("rehearsal", [], 1, {}, Path(sys.argv[2]))
"""


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_training_ends_with_the_command(number: int, tmp_path: Path) -> None:
    training, pid = tmp_path / "training", tmp_path / "pid"
    training.write_text(f"#!/bin/sh\necho $$ > {pid}.new && mv {pid}.new {pid}\nexec sleep 300\n")
    training.chmod(0o755)
    command = subprocess.Popen([sys.executable, "-c", COMMAND, training, tmp_path / "log"], stderr=subprocess.DEVNULL)
    until(pid.exists)
    child = int(pid.read_text())
    try:
        assert os.getpgid(child) != os.getpgid(command.pid)  # a terminal's Ctrl-C does not reach it by itself
        command.send_signal(number)
        assert command.wait(LONG) == {signal.SIGTERM: 128 + signal.SIGTERM}.get(number, -number)
        until(lambda: not is_alive(child))
    finally:
        if is_alive(child):
            os.kill(child, signal.SIGKILL)


def test_workers_end_where_torchrun_is_killed(tmp_path: Path) -> None:
    """torchrun's own end of its workers never runs then: the kernel tells them."""
    model = write_model(tmp_path / "model")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [
        "--log-dir",
        tmp_path / "logs",
        "-m",
        "nemo_flashrl.cli",
        "train",
        "rehearsal",
        f"output={tmp_path / 'run'}",
        f"model.path={model}",
    ]
    torchrun = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    workers: list[int] = []
    try:
        # They have asked the kernel before they import torch, which takes seconds.
        until(lambda: len(with_torch(torchrun.pid)) == 2)
        workers = with_torch(torchrun.pid)
        torchrun.kill()
        until(lambda: not any(map(is_alive, workers)))
    finally:
        for process in [torchrun.pid, *workers]:
            if is_alive(process):
                os.kill(process, signal.SIGKILL)


def with_torch(parent: int) -> list[int]:
    """The child processes that have loaded torch."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(child) for child in children if "libtorch" in Path(f"/proc/{child}/maps").read_text()]
