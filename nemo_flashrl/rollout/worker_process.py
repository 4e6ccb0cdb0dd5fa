"""Rollout workers as the trainer sees them: their processes, the messages to and from them, what they play."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable

from nemo_flashrl.records import Trajectory
from nemo_flashrl.rollout import messages
from nemo_flashrl.rollout.messages import Message

_HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}  # GPUs are the trainer's; no thread to fork


class WorkerLost(Exception):
    """A worker ended before its episodes; `number` is the episode that is to blame, -1 for none."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(why)
        self.number = number


class WorkerFactory:
    """A process that has imported what workers need and forks them; it ends with this one, however that ends."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "nemo_flashrl.rollout.worker", str(theirs.fileno())]
            path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # what this process can import, it can
            environment = {"OMP_NUM_THREADS": "1", **os.environ, **_HIDDEN, **path}
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        self._pids: dict[int, int] = {}  # of workers that live, by their index
        self._ends: dict[int, int] = {}  # exit status of those that do not

    def begin(self, index: int) -> socket.socket:
        """This end of a new worker's connection."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):  # of a factory that is gone: so is the connection
            socket.send_fds(self._control, [str(index).encode()], [theirs.fileno()])
        return ours

    def kill(self, index: int) -> None:
        """End a worker; one that is not there yet ends with its connection."""
        if pid := self.pid(index):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def pid(self, index: int) -> int | None:
        """The process of a worker that lives."""
        self._hear()
        return self._pids.get(index)

    def status(self, index: int) -> int | None:
        """The exit status of a worker that has ended, negative for a signal; None where nobody knows it."""
        self._hear()
        return self._ends.get(index)

    @property
    def gone(self) -> bool:
        """Whether it can make no more workers, and those that it made have ended with it."""
        return self._process.poll() is not None

    def close(self, seconds: float) -> None:
        """Give the workers that are left so long to end, then end all."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.gone:
            self._hear()
            if not self._pids:
                break
            time.sleep(0.02)
        self._process.kill()
        self._process.wait()
        self._control.close()

    def _hear(self) -> None:
        with contextlib.suppress(OSError):  # there is nothing more
            while words := self._control.recv(64, socket.MSG_DONTWAIT).split():
                index, what, number = int(words[0]), words[1], int(words[2])
                if what == b"began":
                    self._pids[index] = number
                else:
                    self._pids.pop(index, None)
                    self._ends[index] = number


class WorkerProcess:
    """One worker: what is sent to it and heard of it, and the episodes that it plays."""

    def __init__(self, index: int, connection: socket.socket) -> None:
        self.index, self._connection = index, connection
        self.heard = time.monotonic()
        self.ready = self.retiring = False
        self.missed = 0  # looks in a row at which it had been silent for too long
        self.episodes: dict[int, asyncio.Future[Trajectory]] = {}
        self.faults: dict[str, int] = {}
        self.drained = asyncio.Event()
        self.reading: asyncio.Task | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._unsent: list[Message] = []  # while there is no writer

    def send(self, message: Message) -> None:
        """Now, or once `messages` has connected."""
        if self._writer is None:
            self._unsent.append(message)
        else:
            self._writer.write(messages.packed(message))

    async def messages(self, first: Callable[[], Iterable[Message]]) -> AsyncIterator[Message]:
        """Connect, send what goes `first`, then hear it until it is gone."""
        self.heard = time.monotonic()
        reader, self._writer = await asyncio.open_connection(sock=self._connection)
        for message in (*first(), *(m for m in self._unsent if not isinstance(m, messages.Servers))):
            self.send(message)  # what is said of servers is newer in `first`
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                yield await messages.read(reader)

    def waits_for(self, number: int) -> asyncio.Future[Trajectory] | None:
        """What an episode is to be told to; None where nobody waits for it any more."""
        future = self.episodes.get(number)
        return None if future is None or future.done() else future

    def fail_episodes(self, error: Exception) -> None:
        """All that it plays."""
        for future in filter(None, map(self.waits_for, self.episodes)):
            future.set_exception(error)

    def close(self) -> None:
        """Let it close its environments and end."""
        if self._writer is not None:
            self._writer.close()
        self._connection.close()
