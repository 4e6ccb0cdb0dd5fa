"""A rollout worker: a process that plays episodes against rollout servers and sends finished trajectories.

Everything that costs CPU in a turn is here: requests, JSON, tokenizer, templates, environments. What to play, and which
servers are in use with which weights, is the trainer's to say (worker_pool.py).

    thread                  what it does
    main                    the event loop: episodes
    "trainer"               reads the trainer's messages
    "outbox"                sends ours, and `Alive` while an episode blocks the event loop, too
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Coroutine, Iterator
from contextvars import ContextVar
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

import transformers.tokenization_utils_fast  # noqa: F401  # slow to import, and wanted by every tokenizer

from nemo_flashrl import environments
from nemo_flashrl.config import settings_of
from nemo_flashrl.engines.base import DrainingEngine
from nemo_flashrl.engines.factory import make_sampler
from nemo_flashrl.engines.server_pool import Fault, Server
from nemo_flashrl.environments.guard import tasks_of
from nemo_flashrl.launch.parent import end_with_parent
from nemo_flashrl.rollout import messages
from nemo_flashrl.rollout.chat_tokens import Codec
from nemo_flashrl.rollout.from_config import episode_limits, held_out_tasks, novelty_of
from nemo_flashrl.rollout.messages import Message, Plan
from nemo_flashrl.rollout.player import Player

BEAT_SECONDS = 1.0
CLOSE_SECONDS = 3.0  # for environments to close after the trainer has let go
_TICK_SECONDS = 0.1
_PAGE = os.sysconf("SC_PAGE_SIZE")
_episode: ContextVar[int] = ContextVar("episode", default=-1)


class Worker:
    """Serves one connection to a trainer, from its `Start` until it is closed."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._outbox: SimpleQueue[Message] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticked = 0.0  # when the event loop last had its turn, on the monotonic clock
        self._episodes: dict[int, asyncio.Task] = {}
        self._lives: list[int] = []  # of the servers, as this worker uses them
        self._revived: dict[int, asyncio.Future[messages.Revived]] = {}
        self._draining: asyncio.Task | None = None

    def run(self) -> None:
        """Until the trainer lets go."""
        threading.Thread(target=self._send, name="outbox", daemon=True).start()
        start = messages.receive(self._connection)
        if start is None:
            return
        try:
            self._make(pickle.loads(start.plan))
        except BaseException as error:
            traceback.print_exc()
            self._outbox.put(messages.Failed(-1, type(error).__name__, messages.as_text(error)))
            while messages.receive(self._connection) is not None:  # until the trainer has read it
                pass
            return
        gc.collect()
        gc.freeze()  # what is made by now stays
        asyncio.run(self._serve())

    def _make(self, plan: Plan) -> None:
        config, tokenizer = plan.config, plan.tokenizer
        self._sampler = make_sampler(config.rollout, plan.vocab_size, self._adopt)
        self._pool = self._sampler.pool
        self._pool.changed = self._tell_lost
        self._lives = [0] * len(self._pool.servers)
        self._engine = DrainingEngine(self._sampler)
        environment = environments.load(config.environment.name)
        settings = settings_of(environment, config.environment.settings, "environment")
        codec, limits = Codec(tokenizer), replace(episode_limits(config), on_long_prompt=None)
        common = {"codec": codec, "limits": limits, "seed": config.trainer.seed}
        tasks, novelty = tasks_of(environment, settings), novelty_of(config, tokenizer)
        self._players = {False: Player(self._engine, lambda: environment(settings), tasks, **common, novelty=novelty)}
        if config.evaluation.every_steps:
            other, held_out = held_out_tasks(config, environment)
            self._players[True] = Player(self._engine, lambda: environment(other), held_out, **common)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_task_factory(_named_by_episode)
        self._closed = asyncio.Event()
        self._tick()
        threading.Thread(target=self._receive, name="trainer", daemon=True).start()
        await self._closed.wait()
        for episode in self._episodes.values():
            episode.cancel()
        await asyncio.gather(*self._episodes.values(), return_exceptions=True)
        await self._engine.close()

    def _tick(self) -> None:
        self._ticked = time.monotonic()
        self._loop.call_later(_TICK_SECONDS, self._tick)

    def _receive(self) -> None:
        """In a thread of its own: a blocked event loop must not hide that the trainer is gone."""
        while (message := messages.receive(self._connection)) is not None:
            self._loop.call_soon_threadsafe(self._handle, message)
        self._loop.call_soon_threadsafe(self._closed.set)
        time.sleep(CLOSE_SECONDS)
        os._exit(0)

    def _send(self) -> None:
        """In a thread of its own, so that `Alive` is sent while an episode blocks the event loop."""
        beat = 0.0
        while True:
            try:
                waited = max(0.0, beat + BEAT_SECONDS - time.monotonic())
                message: Message = self._outbox.get(timeout=waited)
            except Empty:
                message, beat = self._alive(), time.monotonic()
            try:
                self._connection.sendall(messages.packed(message))
            except OSError:
                return

    def _alive(self) -> Message:
        blocked = time.monotonic() - self._ticked - _TICK_SECONDS if self._ticked else 0.0
        running = asyncio.current_task(self._loop) if blocked > BEAT_SECONDS else None
        name = running.get_name() if running else ""
        number = int(name) if name.isdigit() else -1
        with open("/proc/self/statm", encoding="ascii") as statm:
            memory = int(statm.read().split()[1]) * _PAGE
        return messages.Alive(memory, bool(self._ticked), max(0.0, blocked), number)

    def _handle(self, message: Message) -> None:
        match message:
            case messages.Play():
                token = _episode.set(message.number)  # a task inherits it, and those that the task makes
                self._episodes[message.number] = self._loop.create_task(self._play(message))
                _episode.reset(token)
            case messages.Cancel() if message.number in self._episodes:
                self._episodes[message.number].cancel()
            case messages.Servers():
                self._use(message)
            case messages.Drain():
                self._draining = self._loop.create_task(self._drain())
            case messages.Reopen() if self._draining:
                self._draining.cancel()
                self._engine.reopen()
            case messages.Revived():
                if not (waiting := self._revived.pop(message.server)).cancelled():
                    waiting.set_result(message)

    async def _play(self, asked: messages.Play) -> None:
        player, where = self._players[asked.held_out], (asked.prompt_index, asked.task_index, asked.sample)
        try:
            trajectory = messages.pack_trajectory(await player.play(*where, asked.sampling))
            faults = {reason: count for reason, count in self._pool.faults.items() if reason != "servers_lost"}
            self._outbox.put(messages.Ended(asked.number, trajectory, faults))
        except Exception as error:
            self._outbox.put(messages.Failed(asked.number, type(error).__name__, messages.as_text(error)))
        finally:
            del self._episodes[asked.number]

    async def _drain(self) -> None:
        await self._engine.drain()
        self._outbox.put(messages.Drained())

    def _use(self, message: messages.Servers) -> None:
        """The trainer's word on its servers: leave those that are down or were started anew, take up others."""
        if message.replaced:
            self._sampler.weights_replaced()
        for index, (server, life) in enumerate(zip(self._pool.servers, message.lives, strict=True)):
            if server.up and life != self._lives[index]:
                self._lives[index] = 0
                self._pool.drop(server)
            if life and not server.up and self._sampler.opened:
                self._loop.create_task(self._take_up(server))

    async def _take_up(self, server: Server) -> None:
        try:
            await self._pool.bring_up(server)
        except (Fault, ValueError):
            return  # it is asked for again when all are down

    async def _adopt(self, server: Server) -> None:
        """Ask the trainer, which alone loads weights."""
        index = self._pool.servers.index(server)
        self._revived[index] = self._loop.create_future()
        self._outbox.put(messages.Revive(index))
        answer = await self._revived[index]
        if answer.refused:
            raise ValueError(answer.error)
        if not answer.life:
            raise Fault("unreachable", answer.error)
        self._lives[index] = answer.life

    def _tell_lost(self) -> None:
        for index, server in enumerate(self._pool.servers):
            if self._lives[index] and not server.up:
                self._outbox.put(messages.Lost(index, self._lives[index]))
                self._lives[index] = 0


def _named_by_episode(loop: asyncio.AbstractEventLoop, coroutine: Coroutine, **more: Any) -> asyncio.Task:
    """A task that says by its name to which episode it belongs, which another thread can read."""
    return asyncio.Task(coroutine, loop=loop, name=str(_episode.get()), **more)


def _serve_connection(connection: socket.socket) -> None:
    """In a process that was forked for it, which ends here."""
    end_with_parent(signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        Worker(connection).run()
    finally:
        sys.stdout.flush()
        os._exit(0)  # whatever an environment's threads still do


def main() -> None:
    """`python -m nemo_flashrl.rollout.worker FD`: fork a worker for each connection that comes over the socket FD.

    What all workers import is loaded once and shared, and a further one is there at once. Each message is a worker's
    number with its connection, the answer its process ID; "number status" tells of its end.
    """
    end_with_parent(signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole job: the trainer says when to end
        signal.signal(number, lambda *_: None)
    control = socket.socket(fileno=int(sys.argv[1]))
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())  # a byte for each child that ends
    workers: dict[int, int] = {}  # process -> number
    gc.collect()
    gc.freeze()  # a collection would write to pages that are shared
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            woken.recv(4096)
            for process, status in _ended():
                control.send(f"{workers.pop(process)} ended {status}".encode())
        if control in ready:
            message, descriptors, _, _ = socket.recv_fds(control, 64, 1)
            if not message:
                return
            with socket.socket(fileno=descriptors[0]) as connection:
                if (process := os.fork()) == 0:
                    control.close()
                    _serve_connection(connection)
            workers[process] = int(message)
            control.send(f"{workers[process]} began {process}".encode())


def _ended() -> Iterator[tuple[int, int]]:
    """Processes that have ended, each with its exit status, negative for a signal."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended[0], os.waitstatus_to_exitcode(ended[1])


if __name__ == "__main__":
    main()
