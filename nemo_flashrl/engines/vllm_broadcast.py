"""vLLM servers that get new weights over the network, all at once: `rollout.weight_transfer: broadcast`.

    stream -> a folder of this process -> all servers: pause, check -> all good? -> tensor by tensor -> go on -> probe

The folder is there because the stream comes once: from it a broadcast that broke off is begun again, and a server
that comes back later gets its weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from torch.distributed import TCPStore

from nemo_flashrl import platform
from nemo_flashrl.engines.http_refit import SYNC_ATTEMPTS, RemoteEngine, Weights
from nemo_flashrl.engines.server_pool import Fault, Server, say
from nemo_flashrl.engines.vllm import VLLMDialect
from nemo_flashrl.weight_sync.hf_reader import HfTensors, check_finite
from nemo_flashrl.weight_sync.process_group import CONNECT, GO, STOP, TRAINER, WeightGroup

POLL_SECONDS = 0.02


class _Failed(Exception):
    """A common step failed; `faults` has the servers that it failed for, maybe none, and what of."""

    def __init__(self, faults: dict[Server, Fault], reason: str) -> None:
        super().__init__(reason)
        self.faults = faults


class BroadcastEngine(RemoteEngine):
    """An `Engine` over vLLM servers in one process group with this process; arguments as `RemoteEngine` has them.

    `weights_folder` is for this process alone. The group is made anew when a server has gone down or come back.
    """

    dialect = VLLMDialect

    def __init__(self, servers: Sequence[str], vocab_size: int, **options: Any) -> None:
        super().__init__(servers, vocab_size, **options)
        self._device = platform.device()
        self._store: TCPStore | None = None
        self._group: WeightGroup | None = None
        self._members: dict[Server, range] = {}  # their ranks
        self._numbers = itertools.count()
        self._lock = asyncio.Lock()  # one broadcast at a time

    async def close(self) -> None:
        """As all engines; the group is left."""
        await super().close()
        self._leave()

    async def _adopt(self, server: Server) -> None:
        if server in self._members:  # it was in the group before it fell
            self._leave()
        await super()._adopt(server)

    async def _load(self, server: Server, weights: Weights) -> None:
        """One server that has come back."""
        async with self._lock:
            try:
                await self._broadcast([server], weights)
            except _Failed as failure:
                raise failure.faults.get(server) or Fault("broadcast", str(failure)) from failure
        await self._check_probe(server, weights)

    async def _load_everywhere(self, weights: Weights) -> list[BaseException | None]:
        """See `RemoteEngine`. A server that fails is left out at once, and the others begin again without it."""
        servers = self.pool.servers
        failures: dict[Server, BaseException] = {}
        try:
            check_finite(HfTensors(weights.folder), f"weights of version {weights.version}")
        except ValueError as error:
            return [error] * len(servers)
        down = [server for server in servers if not server.up]
        for server, result in zip(
            down, await asyncio.gather(*map(self.pool.bring_up, down), return_exceptions=True), strict=True
        ):
            if result is not None:
                failures[server] = result
        async with self._lock:
            failures |= await self._broadcast_to_the_living([s for s in servers if s not in failures], weights)
        taken = [server for server in servers if server not in failures]
        verified = await asyncio.gather(*(self._check_probe(s, weights) for s in taken), return_exceptions=True)
        failures |= {server: result for server, result in zip(taken, verified, strict=True) if result is not None}
        for server in failures:
            self.pool.drop(server)
        return [failures.get(server) for server in servers]

    async def _broadcast_to_the_living(self, servers: list[Server], weights: Weights) -> dict[Server, BaseException]:
        """What each server failed with that did not take the weights, after some tries with those that are left."""
        failures: dict[Server, BaseException] = {}
        left = servers
        for _ in range(SYNC_ATTEMPTS):
            if not left:
                break
            try:
                await self._broadcast(left, weights)
            except _Failed as failure:
                say(f"weights of version {weights.version}: {failure}")
                self.pool.faults["sync_broadcast"] += 1
                failures |= {s: failure.faults.get(s) or Fault("broadcast", str(failure)) for s in left}
                alive = [server for server in left if await self.pool.examine(server)]
                left = [server for server in alive if server not in failure.faults] or alive
            else:
                return {server: failures[server] for server in servers if server not in left}
        return failures

    async def _broadcast(self, servers: Sequence[Server], weights: Weights) -> None:
        """The weights to `servers`. After a failure they are paused where the old weights are not whole any more.

        Raises:
            _Failed: none of them serves the new weights.
        """
        if set(self._members) != set(servers):
            await self._join(servers)
        group, tensors, begun = self._group, HfTensors(weights.folder), threading.Event()
        step = f"weights {weights.version} ({next(self._numbers)})"
        info = {
            "step": step,
            "names": list(tensors.table),
            "shapes": [entry.shape for entry in tensors.table.values()],
            "dtypes": [entry.dtype for entry in tensors.table.values()],
        }

        def untouched() -> bool:
            return not begun.is_set()

        def send() -> None:
            for _, tensor in tensors.items():
                group.broadcast(tensor.to(self._device), step)

        calls = [self._dialect.load(self.pool, server, weights, info, untouched) for server in servers]
        try:
            await self._together(group, step, dict(zip(self._members, calls, strict=True)), send, begun)
        except _Failed:
            self._leave()
            raise

    async def _join(self, servers: Sequence[Server]) -> None:
        """Make a group of this process and all workers of `servers`. Raises as `_broadcast`."""
        self._leave()
        if self._store is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # listens everywhere
        answers = await asyncio.gather(*(self.pool.call(s, "/get_world_size") for s in servers), return_exceptions=True)
        faults = {s: _as_fault(a) for s, a in zip(servers, answers, strict=True) if isinstance(a, BaseException)}
        if faults:
            raise _Failed(faults, str(next(iter(faults.values()))))
        ends = list(itertools.accumulate((answer["world_size"] for answer in answers), initial=TRAINER + 1))
        members = {s: range(*pair) for s, pair in zip(servers, itertools.pairwise(ends), strict=True)}
        name, timeout = f"group {next(self._numbers)}", self.pool.timeout
        group = WeightGroup(self._store, name, TRAINER, ends[-1], timeout)
        info = {"size": ends[-1], "port": self._store.port, "group": name, "timeout": timeout}
        calls = {
            server: self.pool.call(
                server,
                "/init_weight_transfer_engine",
                {"init_info": info | {"host": _own_address(server.url), "rank_offset": ranks.start}},
            )
            for server, ranks in members.items()
        }
        self._members = members
        try:
            await self._together(group, CONNECT, calls, group.connect, threading.Event())
        except _Failed:
            self._leave()
            raise
        self._group = group

    async def _together(
        self,
        group: WeightGroup,
        step: str,
        calls: Mapping[Server, Coroutine[Any, Any, Any]],
        act: Callable[[], None],
        begun: threading.Event,
    ) -> None:
        """`calls`, which let the workers take part in `step`, and `act`, this process's part, once all are ready.

        Raises:
            _Failed: something failed, with the servers whose call it was; the calls have ended.
        """
        tasks = {asyncio.create_task(self._watched(server, call)): server for server, call in calls.items()}
        acting: asyncio.Future[None] | None = None
        try:
            await self._unless_one_fails(tasks, self._all_reported(group, step))
            begun.set()
            group.decide(step, GO)
            acting = _in_thread(act)
            await self._unless_one_fails(tasks, acting)
            await self._unless_one_fails(tasks, asyncio.wait(tasks))
        except (Fault, ValueError, RuntimeError, TimeoutError, _Failed) as error:
            faults = {s: _as_fault(t.exception()) for t, s in tasks.items() if t.done() and t.exception() is not None}
            faults |= error.faults if isinstance(error, _Failed) else {}
            reason = str(error) or f"{step} took more than {self.pool.timeout:g} s"
            raise _Failed(faults, reason) from error
        finally:
            if not all(task.done() and task.exception() is None for task in tasks):
                group.decide(step, STOP)
                if begun.is_set():  # workers may wait for this process inside the library until it closes
                    group.abort()
                await asyncio.wait(tasks, timeout=self.pool.timeout)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watched(self, server: Server, call: Coroutine[Any, Any, Any]) -> Any:
        """A server that has only come back is not up before it has the weights."""
        return await (self.pool.watched(server, call) if server.up else call)

    async def _unless_one_fails(self, tasks: Iterable[asyncio.Task], work: Awaitable[Any]) -> None:
        """Wait for `work`, but raise what one of `tasks` failed with before it was done."""
        future = asyncio.ensure_future(work)
        try:
            async with asyncio.timeout(self.pool.timeout):
                while not future.done():
                    waiting = [task for task in tasks if not task.done()]
                    await asyncio.wait([future, *waiting], return_when=asyncio.FIRST_COMPLETED)
                    for task in tasks:
                        if task.done():
                            task.result()
                future.result()
        finally:
            future.cancel()

    async def _all_reported(self, group: WeightGroup, step: str) -> None:
        workers = {rank: server for server, ranks in self._members.items() for rank in ranks}
        reports: dict[int, str] = {}
        while len(reports) < len(workers):
            await asyncio.sleep(POLL_SECONDS)
            reports = group.reports(step)
            faults = {workers[rank]: Fault("status", text) for rank, text in reports.items() if text}
            if faults:
                raise _Failed(faults, str(next(iter(faults.values()))))

    def _leave(self) -> None:
        group, self._group, self._members = self._group, None, {}
        if group is not None:
            group.abort()


def _as_fault(error: BaseException) -> Fault:
    return error if isinstance(error, Fault) else Fault("status", str(error))


def _own_address(url: str) -> str:
    """This machine's address on the way to `url`; nothing is sent."""
    host = urlsplit(url).hostname
    family = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))
        return probe.getsockname()[0]


def _in_thread(function: Callable[[], None]) -> asyncio.Future[None]:
    """Run `function`; unlike a pool's, a thread that a network library never lets go of keeps no process alive."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def tell(error: Exception | None) -> None:
        if not future.done():
            future.set_result(None) if error is None else future.set_exception(error)

    def run() -> None:
        error = None
        try:
            function()
        except Exception as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is gone, and whoever asked
            loop.call_soon_threadsafe(tell, error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return future
