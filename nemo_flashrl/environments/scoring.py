"""Scores answers in worker processes: what a policy wrote may make a verifier hang, swell or die, never the run.

Verifiers hand answers to sympy's parsers, which a long power keeps busy for ever. A worker that takes too long is
killed and replaced; one that asks for too much memory gets an error.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import multiprocessing
import resource
from collections.abc import Callable
from typing import Any

MAX_ANSWER = 2000  # characters; a longer answer is wrong without a look
_SECONDS = 20.0
_BYTES = 8 * 2**30
_WORKERS = 2


async def score(function: Callable[..., float], *arguments: Any) -> float:
    """`function(*arguments)` in a worker; 0 where it fails, which is the answer's fault.

    `function` is importable by name, and it and the arguments can be pickled.
    """
    future = _pool().schedule(_safely, args=[function, *arguments], timeout=_SECONDS)
    try:
        return await asyncio.wrap_future(future)
    except OSError:  # killed after _SECONDS: TimeoutError; or it died: pebble's ProcessExpired
        return 0.0


def _safely(function: Callable[..., float], *arguments: Any) -> float:
    try:
        return float(function(*arguments))
    except Exception:  # a verifier of untrusted text
        return 0.0


@functools.cache
def _pool() -> Any:
    from pebble import ProcessPool

    # Started afresh: a copy of the trainer's process would carry its memory, its threads and its devices.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPool(_WORKERS, max_tasks=1000, initializer=_limit_memory, context=context)
    atexit.register(pool.stop)  # or the interpreter waits for idle workers
    return pool


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
