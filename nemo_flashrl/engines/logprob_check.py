"""Asks a server what its log-probs are of, and refuses what a policy gradient would be wrong with."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from nemo_flashrl.engines.server_pool import Server, ServerPool

COUNT = 20  # most servers' limit
NEAR = 0.02  # nats; above the noise of bf16 between two ways to compute the same
_HOT = 2.0


class _Scores(Protocol):
    async def top_logprobs(
        self, pool: ServerPool, server: Server, token_ids: Sequence[int], temperature: float, count: int
    ) -> dict[int, float]: ...

    async def score(self, pool: ServerPool, server: Server, token_ids: Sequence[int]) -> list[float]: ...


async def check_sampling(dialect: _Scores, pool: ServerPool, server: Server, vocab_size: int) -> None:
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
        dialect.top_logprobs(pool, server, prompt, 1.0, count), dialect.top_logprobs(pool, server, prompt, _HOT, count)
    )
    both = sorted(cold.keys() & hot.keys(), key=cold.__getitem__)
    likely, rare = both[-1], both[0]
    if min(cold.values()) < -1000 or min(hot.values()) < -1000:
        raise ValueError(
            f"some of the {count} likeliest tokens have probability 0: the server truncates the distribution (top-k, "
            "top-p or min-p), and importance ratios would be wrong"
        )
    gap, hot_gap = cold[likely] - cold[rare], hot[likely] - hot[rare]
    if abs(hot_gap - gap) < abs(hot_gap - gap / _HOT):
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
