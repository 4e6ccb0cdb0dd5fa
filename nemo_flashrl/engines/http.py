"""Sampling over HTTP servers; what is particular to vLLM or SGLang is a `Dialect`.

generate ----> the server with the least in flight ----> checked answer
                 |  fault: counted, then another server, a few times

Who only samples has a RemoteSampler: a rollout worker. The trainer's process has a RemoteEngine (http_refit.py).
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from nemo_flashrl.engines.base import Context, Span
from nemo_flashrl.engines.server_pool import Fault, Server, ServerPool, say, unreadable
from nemo_flashrl.records import Generation, Sampling
from nemo_flashrl.weight_sync.probe import Probe

GENERATE_ATTEMPTS = 4
COUNT = 20  # of a token's likeliest ones that are asked for; most servers' limit
NEAR = 0.02  # nats; above the noise of bf16 between two ways to compute the same
HOT = 2.0  # a temperature
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

    def weights_replaced(self) -> None:
        """The servers have other weights than those that they were started with, from now on."""
        ...

    def lost(self, error: ValueError) -> str | None:
        """Why a refusal of a generation shows that the server was started anew; None where it does not."""
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

    async def top_logprobs(
        self, pool: ServerPool, server: Server, token_ids: Sequence[int], temperature: float, count: int
    ) -> dict[int, float]:
        """Of the next token, the most likely `count` and the sampled one."""
        ...

    async def score(self, pool: ServerPool, server: Server, token_ids: Sequence[int]) -> list[float]:
        """Log-probs at temperature 1 of `token_ids[1:]`."""
        ...


class RemoteSampler:
    """Samples from servers that speak `dialect`; for one event loop.

    Args:
        servers: their URLs.
        vocab_size: tokens of the model; a server is never asked about, nor believed, one beyond.
        version: of the weights that the servers were started with.
        timeout: seconds for a server to come up, to load weights, or to come back when all are down.
        health_seconds: between two looks at a server that owes an answer.
        adopt: makes a server that answers ready for use; a ValueError refuses it for good.
        tell: is told of servers that go down and come back.
    """

    def __init__(
        self,
        dialect: Dialect,
        servers: Sequence[str],
        vocab_size: int,
        *,
        adopt: Callable[[Server], Awaitable[None]],
        version: int = 0,
        timeout: float = 300.0,
        health_seconds: float = 5.0,
        tell: Callable[[str], None] = say,
    ) -> None:
        if not servers:
            raise ValueError("servers=[]: name the URL of one rollout server at least")
        self._dialect, self._vocab_size = dialect, vocab_size
        self._initial_version: int | None = version  # None once the servers have other weights than at their start
        self._opening: asyncio.Task | None = None
        health = {"health_path": dialect.health_path, "health_seconds": health_seconds}
        self.pool = ServerPool(servers, timeout=timeout, adopt=adopt, tell=tell, **health)

    @property
    def faults(self) -> Counter[str]:
        """What went wrong so far, by reason; each was made good by another try."""
        return self.pool.faults

    @property
    def opened(self) -> bool:
        """Whether `open` has found all servers."""
        return self._opening is not None and self._opening.done() and self._opening.exception() is None

    @property
    def replaced(self) -> bool:
        """Whether the servers have other weights than those of their start."""
        return self._initial_version is None

    def weights_replaced(self) -> None:
        """From now on a server that samples from the weights of its command line was started anew."""
        self._initial_version = None
        self._dialect.weights_replaced()

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        """Continue `token_ids` on one of the servers.

        Raises:
            ValueError: a token outside the vocabulary, or a request that the server refuses (too long a prompt).
            RuntimeError: several servers or several tries failed, or none is up.
        """
        self._check_tokens(context := Context.of(token_ids))
        await self.open()
        body = self._dialect.request(context, sampling)
        last: tuple[Server, Fault] | None = None
        for attempt in range(GENERATE_ATTEMPTS):
            server = await self.pool.take(avoid=last[0] if last else None)
            try:
                return self._read(server, await self._ask(server, body), sampling)
            except Fault as fault:
                last = server, fault
                self.pool.faults[fault.reason] += 1
                if fault.reason == "version":  # it was started anew, with the weights of its command line
                    self.pool.drop(server)
                elif await self.pool.examine(server) and attempt:
                    await asyncio.sleep(2.0**attempt / 4)
        raise RuntimeError(f"a generation failed {GENERATE_ATTEMPTS} times; last fault: {last[1]}") from last[1]

    async def open(self) -> None:
        """Wait for every server and adopt it. Raises as `ServerPool.open`."""
        if self._opening is None:
            self._opening = asyncio.create_task(self.pool.open())
        await asyncio.shield(self._opening)

    async def close(self) -> None:
        """End what is in flight."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        await self.pool.close()

    async def _ask(self, server: Server, body: dict[str, Any]) -> bytes:
        try:
            return await self.pool.ask(server, self._dialect.generate_path, body)
        except ValueError as error:
            if lost := self._dialect.lost(error):
                raise Fault("version", f"{server.url} {lost}") from error
            raise

    def _check_tokens(self, token_ids: Context) -> None:
        if not token_ids or not token_ids.within(self._vocab_size):
            raise ValueError(
                f"a prompt needs at least one token, each in 0..{self._vocab_size - 1}, not {list(token_ids)[:20]}"
            )

    def _read(self, server: Server, answer: bytes, sampling: Sampling) -> Generation:
        """A checked generation: a server's word is not taken for its shape or its numbers."""
        try:
            generation = self._dialect.read(answer, self._initial_version)
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


async def check_sampling(dialect: Dialect, pool: ServerPool, server: Server, vocab_size: int) -> None:
    """Compare a server with itself on one prompt.

    At temperature 2 the gap between two tokens' log-probs must be half of what it is at temperature 1: raw log-probs
    leave it as it is. And a token's log-prob as a sampled one must be its log-prob as a prompt's, which no server
    truncates: top-p or top-k would have raised it.

    Raises:
        ValueError: one of the two, in words.
    """
    prompt = [token % vocab_size for token in (11, 7, 3)]
    count = min(COUNT, vocab_size)
    cold, hot = await asyncio.gather(
        dialect.top_logprobs(pool, server, prompt, 1.0, count), dialect.top_logprobs(pool, server, prompt, HOT, count)
    )
    both = sorted(cold.keys() & hot.keys(), key=cold.__getitem__)
    likely, rare = both[-1], both[0]
    if min(cold.values()) < -1000 or min(hot.values()) < -1000:
        raise ValueError(
            f"some of the {count} likeliest tokens have probability 0: the server truncates the distribution (top-k, "
            "top-p or min-p), and importance ratios would be wrong"
        )
    gap, hot_gap = cold[likely] - cold[rare], hot[likely] - hot[rare]
    if abs(hot_gap - gap) < abs(hot_gap - gap / HOT):
        raise ValueError(
            "log-probs do not change with the temperature: they are raw, not those of the sampling distribution "
            "(vLLM: --logprobs-mode processed_logprobs)"
        )
    whole = (await dialect.score(pool, server, [*prompt, likely]))[-1]
    if abs(cold[likely] - whole) > NEAR:
        raise ValueError(
            f"a token has log-prob {cold[likely]:.4f} when sampled at temperature 1 and {whole:.4f} in the whole "
            "distribution: the server truncates it (top-k, top-p) or adds a penalty"
        )
