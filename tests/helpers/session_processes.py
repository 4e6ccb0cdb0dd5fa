"""The processes that a test session began: ended when it is gone, however that happened; counted while it runs.

    python session_processes.py MARK FOLDER < pipe that the session alone holds open

Workers of a killed pytest have no parent that would end them, and a few hundred threads of theirs starve the machine.
Each process that the session starts inherits MARK in its environment, servers and daemons in sessions of their own too.
FOLDER is their folder for temporary files, removed when the last of them has ended: a process that is killed, or a fork
that ends without its interpreter's exit functions, removes nothing itself.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

NAME = "FLASHRL_TEST_SESSION"
PREFIX = "flashrl-tests-"
GLOO_LOOP = "gloo_tcp_loop"  # the thread that each process group over gloo keeps until it is dropped
KILLING_SECONDS = 60.0
MOST_GLOO_LOOPS = 40  # of a process; each is a thread that polls and two that wait: hundreds starve two cores
STAYS = {  # pattern of what is in the folder until the session ends -> why
    "pymp-*": "the fork server's socket",
    "tmp*wandb-*": "wandb makes them when it is imported, and a fork that is ended does not remove them",
    "torchelastic_*": "torchrun's logs, where a test starts it as a user does",
    "????????-????-????-????-????????????": "vLLM's sockets",
    "torchinductor_*": "torch's compiled code, of jobs that Slurm starts in an environment of their own",
    "vllm_dist_*": "torch's store of a vLLM server, which removes it when it is not killed",
}


class SessionProcesses:
    """Marks what this process starts from now on, has it ended with this process, and counts its gloo loops.

    `folder` holds the temporary files of both, from now on; those of pytest stay where they are, for whoever looks at a
    failed test, and so does torch's cache of what it has compiled.
    """

    def __init__(self, every_seconds: float = 1.0) -> None:
        self.mark = f"{os.getpid()}-{time.time_ns()}"
        self.most_gloo_loops = (0, "")  # of one process at one look, and its command
        usual = tempfile.gettempdir()
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", usual)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{usual}/torchinductor_{getpass.getuser()}")
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        # Its standard input stays open as long as this process lives.
        reaper = [sys.executable, __file__, self.mark, str(self.folder)]
        self._reaper = subprocess.Popen(reaper, stdin=subprocess.PIPE, process_group=0)
        os.environ[NAME] = self.mark
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.folder)
        self._every_seconds = every_seconds
        threading.Thread(target=self._watch, name="session processes", daemon=True).start()

    def _watch(self) -> None:
        """Looks closer at processes with enough threads alone: at all of them it would take a sixth of a core."""
        while True:
            for process in _running_numbers():
                if num_threads(process) > self.most_gloo_loops[0] and (
                    process == os.getpid() or _has(process, self.mark)
                ):
                    self.most_gloo_loops = max(self.most_gloo_loops, (gloo_loops(process), command(process)))
            time.sleep(self._every_seconds)

    def left(self, seconds: float = 60.0) -> list[str]:
        """What the tests have left behind, in words, once what was just ended has had so many seconds to be gone.

        Python's own processes end with the session: fork servers, their trackers, workers of a pool.
        """
        deadline = time.monotonic() + seconds
        while (running := self._running()) and time.monotonic() < deadline:
            time.sleep(0.2)
        files = [file for file in self.folder.iterdir() if not any(map(file.match, STAYS))]
        found = [f"runs: {line}" for line in running] + [f"lies there: {file}" for file in files]
        loops, holder = self.most_gloo_loops
        if loops > MOST_GLOO_LOOPS:
            found.append(f"held {loops} process groups over gloo, more than {MOST_GLOO_LOOPS}: {holder}")
        return found

    def _running(self) -> list[str]:
        commands = [command(process) for process in marked(self.mark) if process != os.getpid()]
        return [line for line in commands if line and "multiprocessing" not in line]


def gloo_loops(process: int) -> int:
    """How many process groups over gloo a process holds; 0 for one that has ended."""
    with contextlib.suppress(OSError):
        return sum(
            _read(file / "comm") == f"{GLOO_LOOP}\n".encode() for file in Path(f"/proc/{process}/task").iterdir()
        )
    return 0


def command(process: int) -> str:
    """Its arguments, cut short."""
    return _read(Path(f"/proc/{process}/cmdline"))[:300].replace(b"\0", b" ").decode(errors="replace")


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # it has ended, or is another user's
        return b""


def num_threads(process: int) -> int:
    """How many threads a process has; 0 for one that has ended."""
    numbers = _read(Path(f"/proc/{process}/stat")).rpartition(b")")[2].split()
    return int(numbers[17]) if numbers else 0


def marked(mark: str) -> list[int]:
    """The processes that carry a mark in their environment."""
    return [number for number in _running_numbers() if _has(number, mark)]


def _running_numbers() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _has(process: int, mark: str) -> bool:
    return f"{NAME}={mark}".encode() in _read(Path(f"/proc/{process}/environ")).split(b"\0")


def main() -> None:
    sys.stdin.buffer.read()
    deadline = time.monotonic() + KILLING_SECONDS
    while (left := marked(sys.argv[1])) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.1)
    shutil.rmtree(sys.argv[2], ignore_errors=True)


if __name__ == "__main__":
    main()
