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
from collections import deque
from collections.abc import Callable
from fractions import Fraction
from typing import Any

_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped one is a letter of the answer
_MAX_BOXES = 20  # that are looked at, from the end
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,4})?")
_RATIO = re.compile(r"([+-]?)(?:\\[dt]?frac\{([+-]?\d+)\}\{(\d+)\}|(\d+)/(\d+))")

# Plain text that math-verify would read the beginning of: 4 of 4√2, 4 of 4 sqrt(2), 2 of 2**3.
_LATEX = (
    (re.compile(r"(?<![\\A-Za-z])sqrt\(([^()]*)\)|√\(([^()]*)\)|√(\d+|[A-Za-z])"), r"\\sqrt{\1\2\3}"),
    (re.compile(r"\*\*(?:\(([^()]*)\)|([+-]?[\d.]+|[A-Za-z]|\\sqrt\{[^{}]*\}))"), r"^{\1\2}"),
)
_NOT_LATEX = re.compile(r"√|\*\*|(?<![\\A-Za-z])sqrt\(")
_DIGITS = 200  # of a constant whose value no rule decides

MAX_ANSWER = 2000  # characters; a longer answer is wrong without a look
_SECONDS = 20.0
_BYTES = 8 * 2**30
_WORKERS = 2


def boxed_answer(text: str) -> str | None:
    """The content of the last \\boxed{} whose braces close; None if there is none.

    >>> boxed_answer("so \\\\boxed{1} or rather \\\\boxed{\\\\frac{1}{2}}.")
    '\\\\frac{1}{2}'
    """
    for box in reversed(deque(_BOX.finditer(text), _MAX_BOXES)):
        depth = 1
        for brace in _BRACE.finditer(text, box.end()):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if not depth:
                return text[box.end() : brace.start()].strip()
    return None


def as_number(text: str) -> Fraction | None:
    """The exact value of an integer, a decimal (1.5e-7 too), a/b or \\frac{a}{b}, thousands apart by commas or not.

    None for anything else.
    """
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
    """Exactly where both are exact constants, else by math-verify: expressions, sets, intervals, equations, and a
    decimal beside an irrational number, which may be rounded. Runs in a worker's main thread, for its time limits.
    """
    from math_verify import verify as same

    given, expected = _parsed(answer), _parsed(right)
    if not (given and expected):
        return False
    one, other = given[0], expected[0]
    if not (_is_constant(one) and _is_constant(other)):
        return same(expected, given, numeric_precision=_DIGITS)
    apart = abs(one.evalf(30) - other.evalf(30))  # of what is clearly apart, nothing long is worked out: 9^{9^9}
    if apart.is_Float and apart > 1e-3 * abs(other.evalf(30)) + 1e-25:
        return False
    one, other = one.doit(), other.doit()
    if one.is_irrational and _is_decimal(right) or other.is_irrational and _is_decimal(answer):
        return bool(one.round(6) == other.round(6) and abs(one - other) < abs(other) / 1000)
    difference = one - other
    known = difference.equals(0)
    if known is None:  # undecided: so many digits of both agree
        known = abs(difference.evalf(_DIGITS)) <= abs(other.evalf(_DIGITS)) * 10 ** (20 - _DIGITS)
    return bool(known)


def _parsed(text: str) -> list[Any]:
    """What math-verify reads in an answer, the expression first; empty where it would read only the beginning."""
    from math_verify import parse
    from sympy import Rational

    number = as_number(text)
    if number is not None:
        return [Rational(number.numerator, number.denominator)]
    for pattern, latex in _LATEX:
        text = pattern.sub(latex, text)
    return [] if _NOT_LATEX.search(text) else parse(f"${text}$")


def _is_constant(expression: Any) -> bool:
    """Whether it is one number, written exactly; a percentage may stand for a number or its hundredth."""
    from sympy import Expr, Float, UnevaluatedExpr

    exact = isinstance(expression, Expr) and not expression.has(Float, UnevaluatedExpr)
    return exact and expression.is_number and expression.is_finite is not False


def _is_decimal(text: str) -> bool:
    return as_number(text) is not None and bool(re.search(r"[.eE]", text.strip().rstrip(".")))


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
