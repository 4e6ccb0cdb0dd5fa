"""Weights that change between two actions, never inside one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from nemo_flashrl.records import Generation, Sampling
from nemo_flashrl.rollout.engine import Engine, NamedTensors


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
        assert self._open.is_set(), "weights are loaded one after another"
        self._open.clear()
        try:
            while self._in_flight:
                self._drained.clear()
                await self._drained.wait()
            await self._engine.load_weights(stream, version)
        finally:
            self._open.set()

    async def close(self) -> None:
        """Close the engine."""
        await self._engine.close()
