"""Mathematical answers: the one in \\boxed{}, and whether it equals the right one.

Verifiers hand answers to sympy's parsers, which a long power keeps busy for ever: what a policy wrote may make one
hang, swell or die, never the run. They work in processes of their own. One that takes too long is killed and replaced;
one that asks for too much memory gets an error.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import multiprocessing
import re
import resource
from collections.abc import Callable
from fractions import Fraction
from typing import Any

_BOX = "\\boxed{"
_MAX_BOXES = 20  # that are looked at, from the end
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)")
_RATIO = re.compile(r"([+-]?)(?:\\[dt]?frac\{([+-]?\d+)\}\{(\d+)\}|(\d+)/(\d+))")

MAX_ANSWER = 2000  # characters; a longer answer is wrong without a look
_SECONDS = 20.0
_BYTES = 8 * 2**30
_WORKERS = 2


def boxed_answer(text: str) -> str | None:
    """The content of the last \\boxed{} whose braces close; None if there is none.

    >>> boxed_answer("so \\\\boxed{1} or rather \\\\boxed{\\\\frac{1}{2}}.")
    '\\\\frac{1}{2}'
    """
    end = len(text)
    for _ in range(_MAX_BOXES):
        begin = text.rfind(_BOX, 0, end)
        if begin < 0:
            break
        depth, start = 1, begin + len(_BOX)
        for position in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if not depth:
                return text[start:position].strip()
        end = begin
    return None


def as_number(text: str) -> Fraction | None:
    """The exact value of an integer, a decimal, a/b or \\frac{a}{b}, thousands apart by commas or not; else None."""
    text = text.strip().strip("$").replace("\\,", "").replace("\\!", "").replace(" ", "").rstrip(".")
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    if len(text) > 100:
        return None
    if _NUMBER.fullmatch(text):
        return Fraction(text)
    if found := _RATIO.fullmatch(text):
        sign, above, below = found[1], int(found[2] or found[4]), int(found[3] or found[5])
        return Fraction(-above if sign == "-" else above, below) if below else None
    return None


async def is_equal(answer: str, right: str) -> bool:
    """Whether two answers mean the same: as exact numbers where both are, else by math-verify."""
    if answer == right:
        return True
    numbers = as_number(answer), as_number(right)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return len(answer) <= MAX_ANSWER and bool(await score(verify, answer, right))


def verify(answer: str, right: str) -> bool:
    """By math-verify: expressions, sets, intervals, equations. Runs in a worker's main thread, for its time limits."""
    from math_verify import parse
    from math_verify import verify as same

    return same(parse(f"${right}$"), parse(f"${answer}$"))


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
