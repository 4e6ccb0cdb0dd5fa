"""What a test session leaves on the machine: nothing, however it ends, and few threads while it runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from session_processes import marked

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


LEAVES = """
import subprocess, sys, time
from pathlib import Path
import session_processes
session_processes.MOST_GLOO_LOOPS = int(sys.argv[2])
session = session_processes.SessionProcesses(every_seconds=0.05)
assert session.left(seconds=0) == []
process = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
while session.most_gloo_loops[0] < 2:
    time.sleep(0.05)
(session.folder / "forgotten").touch()
(session.folder / "pymp-1").touch()
print(*session.left(seconds=0), sep="\\n")
process.kill()
process.wait()
(session.folder / "forgotten").unlink()
print("then", *session.left(seconds=5), sep="\\n")
"""
# Threads named as gloo's are, in place of its own.
HOLDS = """
import ctypes, threading, time
def loop():
    ctypes.CDLL(None).prctl(15, b"gloo_tcp_loop", 0, 0, 0)
    time.sleep(60)
for _ in range(2):
    threading.Thread(target=loop).start()
"""


@pytest.mark.parametrize(("most", "held"), [(1, True), (2, False)])
def test_what_a_session_leaves_is_named(most: int, held: bool) -> None:
    command = [sys.executable, "-c", LEAVES, HOLDS, str(most)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    left, then = done.stdout.split("then\n")
    kinds = [line.split(":")[0] for line in left.splitlines() if re.match("runs|lies|held", line)]
    groups = [f"held 2 process groups over gloo, more than {most}"] * held
    assert kinds == ["runs", "lies there", *groups]
    assert "forgotten" in left and "gloo_tcp_loop" in left
    assert [line.split(":")[0] for line in then.splitlines() if line.startswith(("runs", "lies", "held"))] == groups
