"""What the collector needs of a sampler, whichever it is, and a wrapper that changes weights between two actions."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from nemo_flashrl.records import Generation, Sampling
from nemo_flashrl.weight_sync.probe import NamedTensors


def tokens_to_stop(decode: Callable[[Sequence[int]], str], token_ids: Sequence[int], stop: Sequence[str]) -> int | None:
    """How many of `token_ids` it takes until their text holds one of `stop`; None where it never does."""

    def holds(count: int) -> bool:
        text = decode(token_ids[:count])
        return any(string in text for string in stop)

    if not stop or not holds(len(token_ids)):
        return None
    return 1 + bisect_left(range(1, len(token_ids) + 1), True, key=holds)


def until_stop(decode: Callable[[Sequence[int]], str], action: Generation, stop: Sequence[str]) -> Generation:
    """The action up to the token that completes one of `stop` in its text; an engine may have sampled on."""
    count = tokens_to_stop(decode, action.token_ids, stop)
    if count is None:
        return action
    return Generation(action.token_ids[:count], action.logprobs[:count], action.versions[:count], "stop")


def completes_stop(sampling: Sampling, token_ids: Sequence[int]) -> bool:
    """Whether the text of the last tokens holds a stop string, of which each token has a byte at least."""
    if not sampling.stop:
        return False
    window = 1 + max(len(string.encode()) for string in sampling.stop)
    return tokens_to_stop(sampling.decode, token_ids[-window:], sampling.stop) is not None


class Span(msgspec.Struct):
    """Tokens start..end - 1 of an answer were sampled by the weights of `version`: vLLM and SGLang write it alike."""

    version: str
    start: int
    end: int


class Context(list[int]):
    """What a policy is asked to continue: ids that are only ever added to, and whatever is asked of them costs what is
    new since it was asked before, not the whole conversation."""

    __slots__ = ("_low", "_high", "_checked", "_text", "_written")

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        super().__init__(token_ids)
        self._low, self._high, self._checked = 0, 0, 0
        self._text, self._written = bytearray(), 0

    @classmethod
    def of(cls, token_ids: Sequence[int]) -> Context:
        """`token_ids` itself, if it is one already."""
        return token_ids if isinstance(token_ids, cls) else cls(token_ids)

    def within(self, vocab_size: int) -> bool:
        """Whether each id is in 0..vocab_size - 1."""
        if new := self[self._checked :]:
            self._low, self._high = min(self._low, min(new)), max(self._high, max(new))
            self._checked = len(self)
        return self._low >= 0 and self._high < vocab_size

    def as_json(self) -> msgspec.Raw:
        """A JSON array, for `msgspec.json.encode` of what holds it."""
        if new := self[self._written :]:
            self._text += (b"," if self._written else b"") + msgspec.json.encode(new)[1:-1]
            self._written = len(self)
        return msgspec.Raw(b"[%b]" % self._text)


@runtime_checkable
class Engine(Protocol):
    """A sampler that takes token ids and returns token ids.

    Weights arrive as a stream of Hugging Face names and tensors, one at a time; an engine may not keep
    the tensors it is handed, only copies. `version` is the policy version it now serves; `faults` counts since the
    start, by reason, faults that were recovered from: retries, and `servers_lost`.
    """

    version: int
    faults: Counter[str]

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        """Continue `token_ids`, to which the caller adds after the answer. Many calls may be in flight at once."""
        ...

    async def load_weights(self, stream: NamedTensors, version: int) -> None:
        """Replace all weights, then serve them as `version`; on any error the old ones stay."""
        ...

    async def close(self) -> None:
        """Free what the engine holds; requests in flight fail."""
        ...


class DrainingEngine:
    """An `Engine` around another: a load waits for the requests in flight, requests that come meanwhile wait for it.

    So all tokens of one action are of one version; two actions of an episode may be of two. Episodes go on: a tool that
    works while the weights change is not disturbed.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._in_flight = 0
        self._open, self._drained = asyncio.Event(), asyncio.Event()
        self._open.set()

    @property
    def version(self) -> int:
        """The policy version that the engine serves."""
        return self._engine.version

    @property
    def faults(self) -> Counter[str]:
        """The engine's."""
        return self._engine.faults

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        """As the engine's, once no load is under way."""
        while not self._open.is_set():
            await self._open.wait()
        self._in_flight += 1
        try:
            return await self._engine.generate(token_ids, sampling)
        finally:
            self._in_flight -= 1
            self._drained.set()

    async def load_weights(self, stream: NamedTensors, version: int) -> None:
        """As the engine's, once no request is in flight; `stream` is not touched before."""
        await self.drain()
        try:
            await self._engine.load_weights(stream, version)
        finally:
            self.reopen()

    async def drain(self) -> None:
        """Hold up requests that come from now on, until `reopen`; returns once none is in flight.

        Where it is cancelled, requests go through again.
        """
        assert self._open.is_set(), "weights are loaded one after another"
        self._open.clear()
        try:
            while self._in_flight:
                self._drained.clear()
                await self._drained.wait()
        except asyncio.CancelledError:
            self.reopen()
            raise

    def reopen(self) -> None:
        """Let requests through again."""
        self._open.set()

    async def close(self) -> None:
        """Close the engine."""
        await self._engine.close()
