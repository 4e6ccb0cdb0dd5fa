"""One rollout worker as the trainer sees it: its process, the messages to and from it, the episodes that it plays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence

from nemo_flashrl.records import Trajectory
from nemo_flashrl.rollout import messages
from nemo_flashrl.rollout.messages import Message

# Requests and tokenizers need no GPU and one thread: others of a node have the rest.
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class WorkerLost(Exception):
    """A worker ended before its episodes; `number` is the episode that is to blame, -1 for none."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(why)
        self.number = number


class WorkerProcess:
    """A process that is starting, or plays; it ends with this one, however that ends."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._connection, theirs = socket.socketpair()
        with theirs:
            end = theirs.fileno()
            command = [sys.executable, "-m", "nemo_flashrl.rollout.worker", str(end)]
            path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # what this process can import, it can
            self.process = subprocess.Popen(command, pass_fds=[end], env={**os.environ, **_ENVIRONMENT, **path})
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

    async def messages(self, first: Sequence[Message]) -> AsyncIterator[Message]:
        """Connect, send what goes `first`, then hear it until it is gone."""
        self.heard = time.monotonic()
        reader, self._writer = await asyncio.open_connection(sock=self._connection)
        for message in (*first, *self._unsent):
            self.send(message)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                yield await messages.read(reader)

    def fail_episodes(self, error: Exception) -> None:
        """All that it plays."""
        for future in self.episodes.values():
            if not future.done():
                future.set_exception(error)

    def how_it_ended(self) -> str:
        """In words; called once it is gone."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        status = self.process.returncode
        if status is None:
            return "it closed its connection"
        return f"ended by signal {-status}" if status < 0 else f"ended with status {status}"

    def close(self) -> None:
        """Let it close its environments and end."""
        if self._writer is not None:
            self._writer.close()
        self._connection.close()

    def kill(self, until: float = 0.0) -> None:
        """Wait for its end up to `until`, on the monotonic clock, then end it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, until - time.monotonic()))
        self.process.kill()
        self.process.wait()
