"""The engine over HTTP servers of the process that trains: it samples, and hands them new weights.

load_weights -> a folder (weight_sync/folder.py) -> every server: pause, load, go on -> probe (weight_sync/probe.py)
                 |  fault: the old weights stay; retried a few times

From the optimizer step to a server with its weights:
    callbacks/weight_refit.py       WeightRefitCallback.sync_weights   every rank: a probe, a stream, until it is loaded
    weights/shards.py               stream_hf_tensors                  live shards -> Hugging Face names, one at a time
    rollout/driver.py               RolloutDriver.load_weights         into the event loop's thread
    engines/http_refit.py           RemoteEngine.load_weights          a folder; `Dialect.load`; the probe
    rollout_server/vllm_backend.py  WeightTransfer.receive_weights     in the server: checked, then loaded
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_flashrl.engines.http import Dialect, RemoteSampler, Weights
from nemo_flashrl.engines.server_pool import Fault, NoServer, Server, say
from nemo_flashrl.weight_sync.folder import WeightsHome, write_folder
from nemo_flashrl.weight_sync.probe import NamedTensors

SYNC_ATTEMPTS = 3
SHARED_MEMORY = Path("/dev/shm")


class RemoteEngine(RemoteSampler):
    """An `Engine` over servers that speak its class's `dialect`; for one event loop.

    Args: as `RemoteSampler`'s, and
        weights_folder: where new weights are written for them; every server must see it. None is shared memory.
        context: tokens that an episode may come to; a server that takes fewer is refused. 0 asks none.
    """

    dialect: type[Dialect]

    def __init__(
        self,
        servers: Sequence[str],
        vocab_size: int,
        *,
        version: int = 0,
        weights_folder: str | Path | None = None,
        context: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(self.dialect(), servers, vocab_size, version=version, adopt=self._adopt, **options)
        self.version = version
        self._context = context
        shared = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
        self._home = WeightsHome(Path(weights_folder or shared))
        self._weights: Weights | None = None
        self._syncs = 0

    async def load_weights(self, stream: NamedTensors, version: int) -> None:
        """Hand new weights to all servers and serve them as `version`.

        Requests in flight continue with the new weights. A server that cannot take them is removed from the pool until
        the next sync; where all refuse, the old weights stay; where all are down, one that comes back is waited for.

        Raises:
            NoServer: no server took them, or none came back in time.
            Whatever the stream raises.
        """
        await self.open()
        self._syncs += 1
        weights = Weights(self._home.folder / f"sync-{self._syncs}", version, getattr(stream, "probe", None))
        try:
            await self._write(stream, weights.folder)
            await self._load_anywhere(weights)
        except BaseException:
            shutil.rmtree(weights.folder, ignore_errors=True)
            raise
        if self._weights is not None:
            shutil.rmtree(self._weights.folder, ignore_errors=True)
        self._weights, self.version = weights, version
        self.weights_replaced()

    def lost(self, index: int, life: int) -> None:
        """Who samples beside this engine found server `index` down, or started anew, while it was in this life."""
        server = self.pool.servers[index]
        if server.up and server.life == life:
            self.pool.drop(server)

    async def revive(self, index: int) -> int:
        """Adopt server `index` where it is down; its life. Raises as `open` and as `ServerPool.call`."""
        await self.open()
        await self.pool.bring_up(self.pool.servers[index])
        return self.pool.servers[index].life

    async def close(self) -> None:
        """End what is in flight and remove the weights' folder."""
        await super().close()
        self._home.remove()

    async def _write(self, stream: NamedTensors, folder: Path) -> None:
        """What `Dialect.load` tells servers to read."""
        await write_folder(stream, folder)

    async def _adopt(self, server: Server) -> None:
        await self._dialect.check(self.pool, server, self._vocab_size)
        longest = await self._dialect.longest_context(self.pool, server)
        if longest is not None and longest < self._context:
            raise ValueError(
                f"{server.url} takes at most {longest} tokens (prompt plus answer), and an episode may come to "
                f"{self._context} (model.context_length): start it with `flashrl serve-rollout` and this run's "
                "configuration"
            )
        if self._weights is not None:
            await self._load(server, self._weights)

    async def _load_anywhere(self, weights: Weights) -> None:
        """Until a server serves `weights`; they may all have gone down while no request was in flight."""
        servers = self.pool.servers
        for _ in range(SYNC_ATTEMPTS):
            failures = [result for result in await self._load_everywhere(weights) if result is not None]
            if len(failures) < len(servers):
                return
            lost = any(isinstance(failure, Fault) and failure.reason == "unreachable" for failure in failures)
            if any(await asyncio.gather(*map(self.pool.examine, servers))) and not lost:
                break  # it is up and takes them not; one that was just lost may still have answered
            await self.pool.take()
        said = f"no rollout server took the weights of version {weights.version}: {failures[0]}"
        raise NoServer(said) from failures[0]

    async def _load_everywhere(self, weights: Weights) -> list[BaseException | None]:
        """Bring all servers to `weights`; what each failed with, None for one that serves them."""
        loads = (self._load_with_retries(server, weights) for server in self.pool.servers)
        return await asyncio.gather(*loads, return_exceptions=True)

    async def _load_with_retries(self, server: Server, weights: Weights) -> None:
        """Bring one server to `weights`, if need be after it has come back; out of use when that fails."""
        for attempt in range(SYNC_ATTEMPTS):
            try:
                if not server.up:
                    await self.pool.bring_up(server)
                return await self.pool.watched(server, self._load(server, weights))
            except Fault as fault:
                self.pool.faults[f"sync_{fault.reason}"] += 1
                say(f"weights of version {weights.version}: {fault}")
                last = attempt + 1 == SYNC_ATTEMPTS
                if last or not server.up or not await self.pool.examine(server):
                    self.pool.drop(server)
                    raise

    async def _load(self, server: Server, weights: Weights) -> None:
        await self._dialect.load(self.pool, server, weights)
        await self._check_probe(server, weights)

    async def _check_probe(self, server: Server, weights: Weights) -> None:
        """Fault for a server that computes something else than the trainer does with `weights`."""
        probe = weights.probe
        if probe is None:
            return
        distance = probe.distance(await self._dialect.score(self.pool, server, probe.token_ids))
        if distance > probe.tolerance:
            raise Fault(
                "probe",
                f"{server.url} computes other log-probs than the trainer after the weights of version "
                f"{weights.version}: {distance:.3g} nats per token apart on average, where rounding explains "
                f"{probe.tolerance:.2g}. Look at: a tied LM head that the server did not renew, a prefix cache kept "
                "over the sync, precision (--dtype, quantization and model.precision), the server's version, and "
                "whether it was started from model.path",
            )
        probe.largest = max(distance, probe.largest or 0.0)
