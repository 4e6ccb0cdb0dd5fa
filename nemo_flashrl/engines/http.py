"""An engine over HTTP servers; what is particular to vLLM or SGLang is a `Dialect`.

generate ----> the server with the least in flight ----> checked answer
                 |  fault: counted, then another server, a few times
load_weights -> a folder (weight_sync/folder.py) -> every server: pause, load, go on -> probe (weight_sync/probe.py)
                 |  fault: the old weights stay; retried a few times

From the optimizer step to a server with its weights:
    callbacks/weight_refit.py       WeightRefitCallback.sync_weights   every rank: a probe, a stream, until it is loaded
    weights/shards.py               stream_hf_tensors                  live shards -> Hugging Face names, one at a time
    rollout/driver.py               RolloutDriver.load_weights         into the event loop's thread
    engines/http.py                 RemoteEngine.load_weights          a folder; `Dialect.load`; the probe
    rollout_server/vllm_backend.py  WeightTransfer.receive_weights     in the server: checked, then loaded
"""

from __future__ import annotations

import asyncio
import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from nemo_flashrl.engines.base import Context, Span
from nemo_flashrl.engines.server_pool import Fault, NoServer, Server, ServerPool, say, unreadable
from nemo_flashrl.records import Generation, Sampling
from nemo_flashrl.weight_sync.folder import WeightsHome, write_folder
from nemo_flashrl.weight_sync.probe import NamedTensors, Probe

GENERATE_ATTEMPTS = 4
SYNC_ATTEMPTS = 3
SHARED_MEMORY = Path("/dev/shm")
INITIAL = "default"  # what vLLM and SGLang call weights that nobody has replaced


@dataclass(frozen=True, slots=True)
class Weights:
    """What every server shall serve: a folder that stays until the next one has arrived."""

    folder: Path
    version: int
    probe: Probe | None


class Dialect(Protocol):
    """How one kind of server is spoken to. Methods raise Fault where it fails, ValueError where it is no use at all."""

    health_path: str
    generate_path: str

    def request(self, token_ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
        """The body of one generation."""
        ...

    def read(self, answer: bytes, initial_version: int | None) -> Generation:
        """The generation in an answer; `initial_version` is that of the weights a server starts with, if it counts.

        Anything missing or of another shape may raise KeyError, IndexError, TypeError or ValueError.
        """
        ...

    async def check(self, pool: ServerPool, server: Server, vocab_size: int) -> None:
        """Refuse a server that cannot be trained from a model of `vocab_size` tokens."""
        ...

    async def longest_context(self, pool: ServerPool, server: Server) -> int | None:
        """Tokens of prompt and answer together that it takes; None where it does not say."""
        ...

    async def load(self, pool: ServerPool, server: Server, weights: Weights) -> None:
        """Replace a server's weights between two tokens of what is in flight."""
        ...

    async def score(self, pool: ServerPool, server: Server, token_ids: Sequence[int]) -> list[float]:
        """Log-probs at temperature 1 of `token_ids[1:]`."""
        ...


class RemoteEngine:
    """An `Engine` over servers that speak its class's `dialect`; for one event loop.

    Args:
        servers: their URLs.
        vocab_size: tokens of the model; a server is never asked about, nor believed, one beyond.
        version: of the weights that the servers were started with.
        weights_folder: where new weights are written for them; every server must see it. None is shared memory.
        timeout: seconds for a server to come up, to load weights, or to come back when all are down.
        health_seconds: between two looks at a server that owes an answer.
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
        timeout: float = 300.0,
        health_seconds: float = 5.0,
        context: int = 0,
    ) -> None:
        if not servers:
            raise ValueError("servers=[]: name the URL of one rollout server at least")
        self.version = version
        self._dialect, self._vocab_size, self._initial_version = self.dialect(), vocab_size, version
        self._context = context
        shared = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
        self._home = WeightsHome(Path(weights_folder or shared))
        self._weights: Weights | None = None
        self._syncs = 0
        self._opening: asyncio.Task | None = None
        health = {"health_path": self._dialect.health_path, "health_seconds": health_seconds}
        self._pool = ServerPool(servers, timeout=timeout, adopt=self._adopt, **health)

    @property
    def faults(self) -> Counter[str]:
        """What went wrong so far, by reason; each was made good by another try."""
        return self._pool.faults

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        """Continue `token_ids` on one of the servers.

        Raises:
            ValueError: a token outside the vocabulary, or a request that the server refuses (too long a prompt).
            RuntimeError: several servers or several tries failed, or none is up.
        """
        self._check_tokens(context := Context.of(token_ids))
        await self._open()
        body = self._dialect.request(context, sampling)
        last: tuple[Server, Fault] | None = None
        for attempt in range(GENERATE_ATTEMPTS):
            server = await self._pool.take(avoid=last[0] if last else None)
            try:
                return self._read(server, await self._ask(server, body), sampling)
            except Fault as fault:
                last = server, fault
                self._pool.faults[fault.reason] += 1
                if fault.reason == "version":  # it was started anew, with the weights of its command line
                    self._pool.drop(server)
                elif await self._pool.examine(server) and attempt:
                    await asyncio.sleep(2.0**attempt / 4)
        raise RuntimeError(f"a generation failed {GENERATE_ATTEMPTS} times; last fault: {last[1]}") from last[1]

    async def load_weights(self, stream: NamedTensors, version: int) -> None:
        """Hand new weights to all servers and serve them as `version`.

        Requests in flight continue with the new weights. A server that cannot take them is removed from the pool until
        the next sync; where all refuse, the old weights stay; where all are down, one that comes back is waited for.

        Raises:
            NoServer: no server took them, or none came back in time.
            Whatever the stream raises.
        """
        await self._open()
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

    async def close(self) -> None:
        """End what is in flight and remove the weights' folder."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        await self._pool.close()
        self._home.remove()

    async def _write(self, stream: NamedTensors, folder: Path) -> None:
        """What `Dialect.load` tells servers to read."""
        await write_folder(stream, folder)

    async def _ask(self, server: Server, body: dict[str, Any]) -> bytes:
        return await self._pool.ask(server, self._dialect.generate_path, body)

    async def _open(self) -> None:
        if self._opening is None:
            self._opening = asyncio.create_task(self._pool.open())
        await asyncio.shield(self._opening)

    async def _adopt(self, server: Server) -> None:
        await self._dialect.check(self._pool, server, self._vocab_size)
        longest = await self._dialect.longest_context(self._pool, server)
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
        servers = self._pool.servers
        for _ in range(SYNC_ATTEMPTS):
            failures = [result for result in await self._load_everywhere(weights) if result is not None]
            if len(failures) < len(servers):
                return
            lost = any(isinstance(failure, Fault) and failure.reason == "unreachable" for failure in failures)
            if any(await asyncio.gather(*map(self._pool.examine, servers))) and not lost:
                break  # it is up and takes them not; one that was just lost may still have answered
            await self._pool.take()
        said = f"no rollout server took the weights of version {weights.version}: {failures[0]}"
        raise NoServer(said) from failures[0]

    async def _load_everywhere(self, weights: Weights) -> list[BaseException | None]:
        """Bring all servers to `weights`; what each failed with, None for one that serves them."""
        loads = (self._load_with_retries(server, weights) for server in self._pool.servers)
        return await asyncio.gather(*loads, return_exceptions=True)

    async def _load_with_retries(self, server: Server, weights: Weights) -> None:
        """Bring one server to `weights`, if need be after it has come back; out of use when that fails."""
        for attempt in range(SYNC_ATTEMPTS):
            try:
                if not server.up:
                    await self._pool.bring_up(server)
                return await self._pool.watched(server, self._load(server, weights))
            except Fault as fault:
                self._pool.faults[f"sync_{fault.reason}"] += 1
                say(f"weights of version {weights.version}: {fault}")
                last = attempt + 1 == SYNC_ATTEMPTS
                if last or not server.up or not await self._pool.examine(server):
                    self._pool.drop(server)
                    raise

    async def _load(self, server: Server, weights: Weights) -> None:
        await self._dialect.load(self._pool, server, weights)
        await self._check_probe(server, weights)

    async def _check_probe(self, server: Server, weights: Weights) -> None:
        """Fault for a server that computes something else than the trainer does with `weights`."""
        probe = weights.probe
        if probe is None:
            return
        distance = probe.distance(await self._dialect.score(self._pool, server, probe.token_ids))
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

    def _check_tokens(self, token_ids: Context) -> None:
        if not token_ids or not token_ids.within(self._vocab_size):
            raise ValueError(
                f"a prompt needs at least one token, each in 0..{self._vocab_size - 1}, not {list(token_ids)[:20]}"
            )

    def _read(self, server: Server, answer: bytes, sampling: Sampling) -> Generation:
        """A checked generation: a server's word is not taken for its shape or its numbers."""
        try:
            generation = self._dialect.read(answer, self._initial_version if self._weights is None else None)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise unreadable(server.url + self._dialect.generate_path, answer, error) from error
        count = len(generation.token_ids)
        if not count == len(generation.logprobs) == len(generation.versions) or not 0 < count <= sampling.max_tokens:
            raise Fault(
                "token_count",
                f"{server.url} answered with {count} tokens, {len(generation.logprobs)} log-probs and "
                f"{len(generation.versions)} versions where 1 to {sampling.max_tokens} were asked for",
            )
        token_ids = np.array(generation.token_ids)
        if token_ids.min() < 0 or token_ids.max() >= self._vocab_size:
            raise Fault("token_id", f"{server.url} sampled a token outside the vocabulary of {self._vocab_size}")
        if not math.isfinite(sum(generation.logprobs)) or max(generation.logprobs) > 1e-5:
            raise Fault("logprob", f"{server.url} answered with an invalid log-prob: {min(generation.logprobs)}")
        return generation


def token_versions(spans: Sequence[Span], initial_version: int | None) -> tuple[int, ...]:
    """Version by token."""
    versions: list[int] = []
    for span in spans:
        if span.start != len(versions):
            raise ValueError(f"weight versions are not in a row: {spans}")
        if span.version == INITIAL and initial_version is None:
            raise Fault("version", "the server samples from the weights of its command line: it was started anew")
        version = initial_version if span.version == INITIAL else int(span.version)
        versions += [version] * (span.end - span.start)
    return tuple(versions)
