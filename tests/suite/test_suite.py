"""What a test session leaves on the machine: nothing, however it ends, and few threads while it runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from session_processes import SessionProcesses, command, marked

SESSION = """
import os, sys, time
from pathlib import Path
from processes import run_ranks
from session_processes import SessionProcesses
if __name__ == "__main__":
    session = SessionProcesses()
    Path(sys.argv[1]).write_text(f"{session.mark} {session.folder}")
    run_ranks(2, "sleeper", Path(sys.argv[1]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_and_temporary_files_end_with_a_session_that_is_killed(number: int, tmp_path: Path) -> None:
    script, noted = tmp_path / "session.py", tmp_path / "mark"
    script.write_text(SESSION)
    (tmp_path / "preload.py").touch()  # in place of ours: the ranks sleep, and need no NeMo
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"}
    session = subprocess.Popen([sys.executable, script, noted], env=environment)
    try:
        deadline = time.monotonic() + 240
        while len(list(tmp_path.glob("mark.*"))) < 2:
            assert time.monotonic() < deadline and session.poll() is None
            time.sleep(0.1)
        mark, folder = noted.read_text().split()
        assert any(Path(folder).iterdir())  # the logs of its ranks
        assert len(marked(mark)) >= 4  # the fork server, the tracker of its resources and two ranks
        session.send_signal(number)
        session.wait(60)
        while marked(mark) or Path(folder).exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        session.kill()


def test_no_process_holds_many_process_groups(session_processes: SessionProcesses) -> None:
    """Each one is a thread that polls and two that wait: hundreds starve a machine of two cores."""
    loops, command = session_processes.most_gloo_loops
    assert loops <= 40, command


STAYS = {  # pattern of what is there until the session ends -> why
    "pymp-*": "the fork server's socket",
    "tmp*wandb-*": "wandb makes them when it is imported, and a fork that is ended does not remove them",
    "torchelastic_*": "torchrun's logs, where a test starts it as a user does",
    "????????-????-????-????-????????????": "vLLM's sockets",
    "torchinductor_*": "torch's compiled code, of jobs that Slurm starts in an environment of their own",
    "vllm_dist_*": "torch's store of a vLLM server, which removes it when it is not killed",
}


def test_no_temporary_file_is_left(session_processes: SessionProcesses) -> None:
    """By the product or by a test; this one comes last."""
    left = [file for file in session_processes.folder.iterdir() if not any(map(file.match, STAYS))]
    assert not left


def test_no_process_is_left(session_processes: SessionProcesses) -> None:
    """But Python's own, which end with the session: the fork server, its tracker, workers of a pool."""
    deadline = time.monotonic() + 60
    while left := others(session_processes.mark):  # what ends the processes of a killed session has just begun
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def others(mark: str) -> list[str]:
    """Commands of the processes with a mark, Python's own left out."""
    commands = [command(process) for process in marked(mark) if process != os.getpid()]
    return [line for line in commands if line and "multiprocessing" not in line]
