"""Calls of an environment, which is not ours: whatever it raises, returns or never returns ends its episode alone."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from nemo_flashrl.environments.environment import Environment, Message, StepResult

T = TypeVar("T")
_GRACE = 1.0  # seconds for a call that was cancelled to tidy up; then it is left behind
_LONGEST_ERROR = 1000  # characters of an error that are kept


class EnvironmentFailure(Exception):
    """The environment raised, took too long, or answered with something that is no answer."""


async def ask(name: str, timeout: float, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """Await one call of the environment, for at most `timeout` seconds.

    It runs in a task of its own, so that one which swallows its cancellation holds up nobody. Code that blocks the
    event loop, `time.sleep` say, holds up everybody and cannot be ended from here: it belongs into a thread or process.
    """
    call = asyncio.ensure_future(_called(name, function, arguments))
    try:
        await asyncio.wait({call}, timeout=timeout)
        late = not call.done()
    finally:
        if not call.done():
            call.cancel()
            await asyncio.wait({call}, timeout=_GRACE)
            call.add_done_callback(lambda left: left.cancelled() or left.exception())  # nobody asks for it any more
    if late:
        raise EnvironmentFailure(f"{name}: no answer in {timeout} s")
    if call.cancelled():
        raise EnvironmentFailure(f"{name}: cancelled itself")
    return call.result()


async def _called(name: str, function: Callable[..., Awaitable[T]], arguments: tuple[Any, ...]) -> T:
    try:
        return await function(*arguments)
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
        raise EnvironmentFailure(f"{name}: {what}") from error


async def reset(environment: Environment, task: Any) -> list[Message]:
    """The prompt, checked."""
    messages = await environment.reset(task)
    if not messages or not all(isinstance(message["content"], str) for message in messages):
        raise TypeError("the prompt is no list of messages with a text each")
    return list(messages)


async def step(environment: Environment, action: str) -> StepResult:
    """The answer to an action, checked."""
    result = await environment.step(action)
    if not (isinstance(result, StepResult) and isinstance(result.observation, str) and isinstance(result.info, dict)):
        raise TypeError(f"the answer is a {type(result).__name__}, not a StepResult with a text and a dict")
    for name, value in {"reward": result.reward, "process reward": result.process_reward, **result.shaping}.items():
        if not math.isfinite(value):
            raise ValueError(f"the {name} is {value}")
    try:
        json.dumps(result.info)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"the info is nothing that JSON can hold: {error}") from error
    return result
