"""What a test session leaves on the machine: nothing, however it ends, and few threads while it runs."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from session_processes import SessionProcesses, marked

SESSION = """
import os, sys, time
from pathlib import Path
from processes import run_ranks
from session_processes import SessionProcesses
if __name__ == "__main__":
    Path(sys.argv[1]).write_text(SessionProcesses().mark)
    run_ranks(2, "sleeper", Path(sys.argv[1]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_a_session_that_is_killed(number: int, tmp_path: Path) -> None:
    script, noted = tmp_path / "session.py", tmp_path / "mark"
    script.write_text(SESSION)
    session = subprocess.Popen([sys.executable, script, noted])
    try:
        deadline = time.monotonic() + 240
        while len(list(tmp_path.glob("mark.*"))) < 2:
            assert time.monotonic() < deadline and session.poll() is None
            time.sleep(0.1)
        mark = noted.read_text()
        assert len(marked(mark)) >= 4  # the fork server, the tracker of its resources and two ranks
        session.send_signal(number)
        session.wait(60)
        while marked(mark):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        session.kill()


def test_no_process_holds_many_process_groups(session_processes: SessionProcesses) -> None:
    """Each one is a thread that polls and two that wait: hundreds starve a machine of two cores."""
    loops, command = session_processes.most_gloo_loops
    assert loops <= 40, command
