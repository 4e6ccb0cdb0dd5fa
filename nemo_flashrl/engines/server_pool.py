"""HTTP servers that share one load: who is up, who has the least to do, and whether silence means work or death.

    ask -> POST ................................ answer
             |  while it waits: GET health, again and again
             +--> refused, 5xx, or three missed checks: the server is down, all its requests fail at once

A generation has no time-out of its own: a long turn on a healthy server is waited for, never sent twice.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import aiohttp
import msgspec

from nemo_flashrl.engines.http_connection import Connections

T = TypeVar("T")
MISSED_CHECKS = 3  # silent health checks in a row; one may be the fault of a busy machine
_KEEP_ALIVE = 1.0  # seconds; uvicorn closes an idle connection after 5, and a busy one does over a waiting request
_PATIENCE = 5.0  # seconds of waiting for a server before it is told
_REFUSED = range(400, 500)
_PASSING = (408, 425, 429)  # refusals that another server, or another moment, may not repeat


class Fault(Exception):
    """A server did not do its part; another one, or a second try, may. `reason` is what faults are counted by."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class NoServer(RuntimeError):
    """No server came up in time, or none takes the weights; nothing is wrong with the run itself."""


class Server:
    """One URL and what is known of it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.connections = Connections(self.url, _KEEP_ALIVE) if Connections.can_reach(self.url) else None
        self.up = False
        self.life = 0  # how often it was adopted
        self.in_flight = 0
        self.was_up = False
        self.abandon: set[Callable[[], None]] = set()  # of what waits for it: called when it goes down
        self.watcher: asyncio.Task | None = None
        self.rising = asyncio.Lock()


class ServerPool:
    """Sends JSON to servers; for one event loop.

    Args:
        urls: of servers that do the same.
        timeout: seconds to wait for a server to come up, and for one control call.
        health_path: answers 200 as long as the server can work.
        health_seconds: between two looks at a server that owes an answer.
        adopt: makes a server that answers ready for use; a ValueError refuses it for good.
        tell: is told of servers that go down and come back.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout: float,
        health_path: str,
        health_seconds: float,
        adopt: Callable[[Server], Awaitable[None]],
        tell: Callable[[str], None],
    ) -> None:
        self.servers = [Server(url) for url in urls]
        self.timeout = timeout
        self.faults: Counter[str] = Counter()
        self.changed: Callable[[], None] = lambda: None  # called when a server goes down or comes up
        self._health_path, self._health_seconds, self._adopt, self._tell = health_path, health_seconds, adopt, tell
        self._session: aiohttp.ClientSession | None = None
        self._reviving: asyncio.Task | None = None
        self._closed = False

    async def open(self) -> None:
        """Wait for every server and adopt it.

        Raises:
            NoServer: one did not come up in time. ValueError: one was refused.
        """
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE)
        self._session = aiohttp.ClientSession(connector=connector)
        waiting = [asyncio.create_task(self._come_up([server])) for server in self.servers]
        try:
            await asyncio.gather(*waiting)
        finally:
            for task in waiting:
                task.cancel()

    async def take(self, avoid: Server | None = None) -> Server:
        """The server with the least in flight, not `avoid` if there is another; waits for one while all are down.

        Raises:
            NoServer: none came back in `timeout` seconds. RuntimeError: the pool is closed.
        """
        if self._closed:
            raise RuntimeError("the engine is closed")
        ready = [server for server in self.servers if server.up]
        if not ready:
            if self._reviving is None or self._reviving.done():
                self._reviving = asyncio.create_task(self._come_up(self.servers))
            await asyncio.shield(self._reviving)
            return await self.take(avoid)
        return min([server for server in ready if server is not avoid] or ready, key=lambda server: server.in_flight)

    async def ask(self, server: Server, path: str, body: dict[str, Any]) -> bytes:
        """Post and wait as long as the server is alive; returns what it says, as it came.

        Raises:
            Fault: it went down or failed. ValueError: it refused the request.
        """
        return await self.watched(server, self._send(server, path, body, timeout=None))

    async def watched(self, server: Server, work: Coroutine[Any, Any, T]) -> T:
        """What `work` on a server that is up returns, while it is alive. Raises as `work`; Fault: it went down."""
        server.in_flight += 1
        if server.watcher is None or server.watcher.done():
            server.watcher = asyncio.create_task(self._watch(server))
        # As asyncio.timeout does it: this task is cancelled where it waits, and what comes of it is ours to tell.
        task, down = asyncio.current_task(), False
        cancelled = task.cancelling()

        def abandon() -> None:
            nonlocal down
            down = task.cancel()

        server.abandon.add(abandon)
        try:
            return await work
        except asyncio.CancelledError:
            if not down or task.cancelling() > cancelled + 1:  # somebody else cancels it
                raise
            raise Fault("dead", f"{server.url} went down with a request in flight") from None
        finally:
            server.in_flight -= 1
            server.abandon.discard(abandon)
            if down:
                task.uncancel()

    async def call(
        self, server: Server, path: str, body: dict[str, Any] | None = None, *, timeout: float | None = 0
    ) -> Any:
        """POST `body`, or GET where there is none; returns the answer's JSON, None for an empty one.

        `timeout` in seconds; 0 is the pool's own, None is none. Raises as `ask`; Fault: what it says is not JSON.
        """
        content = await self._send(server, path, body, timeout)
        try:
            return json.loads(content) if content else None
        except ValueError as error:
            raise unreadable(server.url + path, content, error) from error

    async def _send(self, server: Server, path: str, body: dict[str, Any] | None, timeout: float | None) -> bytes:
        limit = aiohttp.ClientTimeout(total=self.timeout if timeout == 0 else timeout)
        method, url = "GET" if body is None else "POST", server.url + path
        # After an error of its own a server closes a connection that it had promised to keep; the next call would fail.
        headers = {} if timeout is None else {"Connection": "close"}
        data = None if body is None else msgspec.json.encode(body)
        if data is not None:
            headers["Content-Type"] = "application/json"
        try:
            if timeout is None and server.connections is not None:
                status, content = await server.connections.post(path, data)
            else:
                async with self._session.request(method, url, data=data, timeout=limit, headers=headers) as response:
                    content, status = await response.read(), response.status
        except TimeoutError as error:
            raise Fault("timeout", f"{server.url}{path} timed out after {limit.total:g} s") from error
        except (aiohttp.ClientError, OSError, RuntimeError) as error:  # RuntimeError: the session was closed meanwhile
            raise Fault("unreachable", f"{server.url}{path}: {type(error).__name__}: {error}") from error
        if status in _REFUSED and status not in _PASSING:
            raise ValueError(f"{server.url}{path} refused the request ({status}): {_excerpt(content)}")
        if status != 200:
            raise Fault("status", f"{server.url}{path} failed ({status}): {_excerpt(content)}")
        return content

    async def examine(self, server: Server) -> bool:
        """Check whether a server is alive, and drop it from the pool if it is not."""
        try:
            await self._check_health(server)
        except Fault as fault:
            self.drop(server, str(fault))
            return False
        return True

    def drop(self, server: Server, why: str = "") -> None:
        """Remove a server from the pool until it is adopted again; its requests in flight fail now."""
        if server.up:
            server.up = False
            self.faults["servers_lost"] += 1
            if not self._closed:
                self._tell(f"{server.url} is down, removed from the pool" + (f": {why}" if why else ""))
            for abandon in server.abandon:
                abandon()
            self.changed()

    async def bring_up(self, server: Server) -> None:
        """Adopt a server that is down, if it answers. Raises as `call`."""
        async with server.rising:  # a request that waits for one and new weights may both ask for it
            if server.up:
                return
            await self._check_health(server)
            await self._adopt(server)
            if server.was_up:
                self._tell(f"{server.url} is up again, back in the pool")
            server.up = server.was_up = True
            server.life += 1
            self.changed()

    async def close(self) -> None:
        """Let go of everything; requests in flight fail."""
        self._closed = True
        for server in self.servers:
            self.drop(server)
            if server.connections is not None:
                server.connections.close()
        tasks = [s.watcher for s in self.servers if s.watcher] + ([self._reviving] if self._reviving else [])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _come_up(self, servers: Sequence[Server]) -> None:
        """Return when one of `servers` is up."""
        last: Exception | None = None
        urls = ", ".join(server.url for server in servers)
        tell_at = asyncio.get_running_loop().time() + _PATIENCE
        try:
            async with asyncio.timeout(self.timeout):
                while True:
                    for server in servers:
                        try:
                            return await self.bring_up(server)
                        except Fault as fault:
                            last = fault
                    if asyncio.get_running_loop().time() > tell_at:
                        tell_at = math.inf
                        self._tell(f"waiting for {urls}, up to {self.timeout:g} s (rollout.server_timeout): {last}")
                    await asyncio.sleep(min(1.0, self._health_seconds))
        except TimeoutError as error:
            raise NoServer(
                f"no rollout server came up in {self.timeout:g} s (rollout.server_timeout): {urls}; last fault: {last}"
            ) from error

    async def _check_health(self, server: Server) -> None:
        """Fault when it is not well; what it says beside 200 does not matter."""
        try:
            await self.call(server, self._health_path, timeout=2 * self._health_seconds)
        except ValueError as error:
            raise Fault("status", str(error)) from error
        except Fault as fault:
            if fault.reason != "malformed":
                raise

    async def _watch(self, server: Server) -> None:
        """Health-check a server as long as it has requests in flight."""
        missed = 0
        while server.up and server.in_flight:
            await asyncio.sleep(self._health_seconds)
            try:
                await self._check_health(server)
                missed = 0
            except Fault as fault:
                missed = missed + 1 if fault.reason == "timeout" else MISSED_CHECKS
                if missed >= MISSED_CHECKS:
                    self.drop(server, str(fault))


def say(text: str) -> None:
    """A line on stderr, for whoever watches the run."""
    print(f"rollouts: {text}", file=sys.stderr, flush=True)


def unreadable(url: str, content: bytes, error: Exception) -> Fault:
    """What to raise of an answer that is no JSON, or not of the form that was asked for."""
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) or type(error) is msgspec.DecodeError:
        return Fault("malformed", f"{url} did not answer with JSON: {_excerpt(content)}")
    return Fault("malformed", f"{url} answered in an unknown format: {error!r}")


def _excerpt(content: bytes) -> str:
    """On one line, so that it can stand in a message."""
    return " ".join(content[:300].decode(errors="replace").split()) or "(nothing)"
