"""Calls of an environment, which is not ours: whatever it raises, returns or never returns ends its episode alone."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from nemo_flashrl.environments.environment import Environment, Message, StepResult

T = TypeVar("T")
_GRACE = 1.0  # seconds for a call that was cancelled to tidy up; then it is left behind
_LONGEST_ERROR = 1000  # characters of an error that are kept
# Of a reward, process reward or shaping term. Gradients are proportional to them where nothing scales advantages, and
# their squares have to stay far from fp32's 3e38, summed over a model's weights too; no task needs a wider scale.
LARGEST_REWARD = 1e6
# For the loop to handle; else what derives from BaseException alone, an exit or a panic in Rust, is the environment's.
_OURS = (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit)
_MESSAGES = "a list of messages like {'role': 'user', 'content': 'text'}"


class EnvironmentFailure(Exception):
    """The environment raised, timed out, or returned something invalid."""


async def ask(name: str, timeout: float, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """Await one call of the environment, for at most `timeout` seconds.

    It runs in a task of its own, so that one which swallows its cancellation holds up nobody. Code that blocks the
    event loop, `time.sleep` say, holds up every episode of this process and cannot be ended from here: a rollout worker
    is replaced for it, the trainer's process has to wait.
    """
    call = asyncio.ensure_future(_called(name, function, arguments))
    # Where the call is left behind, or this one is cancelled, nobody else asks what it failed of.
    call.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    try:
        await asyncio.sleep(0)  # most calls wait for nothing, are done by now, and need no timer
        if not call.done():
            await asyncio.wait({call}, timeout=timeout)
        late = not call.done()
    finally:
        if not call.done():
            call.cancel()
            await asyncio.wait({call}, timeout=_GRACE)
    if late:
        raise EnvironmentFailure(f"{name}: timed out after {timeout:g} s (rollout.step_timeout)")
    if call.cancelled():
        raise EnvironmentFailure(f"{name}: cancelled itself")
    return call.result()


async def _called(name: str, function: Callable[..., Awaitable[T]], arguments: tuple[Any, ...]) -> T:
    try:
        return await awaited(name, function(*arguments))
    except (EnvironmentFailure, *_OURS):
        raise
    except BaseException as error:
        raise EnvironmentFailure(f"{name}: {in_words(error)}") from error


def in_words(error: BaseException) -> str:
    """Type and message of an error, which may be one of the environment's own classes, and where it was raised."""
    text = type(error).__name__
    with contextlib.suppress(Exception):  # of its __str__
        text = f"{text}: {error}"[:_LONGEST_ERROR].removesuffix(": ")
    place = raised_at(error)
    return f"{text} ({place})" if place else text


def raised_at(error: BaseException) -> str:
    """`file:line` of the environment's own code: the deepest in the folder of what we called; empty where none is.

    A library that it calls, beside it in a virtual environment too, is not its own.
    """
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    frames = [(file, line) for file, line in frames if not _is_between(file)]
    if not frames:
        return ""
    folder = os.path.join(os.path.dirname(frames[0][0]), "")
    own = [
        f"{file}:{line}"
        for file, line in frames
        if file.startswith(folder) and "site-packages" not in file.removeprefix(folder)
    ]
    return own[-1]


def _is_between(file: str) -> bool:
    """Whether it is Python's machinery, or ours outside of the environments that we ship."""
    here = os.path.dirname(__file__)
    loading = file in (__file__, os.path.join(here, "__init__.py"))
    ours = file.startswith(os.path.join(os.path.dirname(here), "")) and (os.path.dirname(file) != here or loading)
    return ours or file.startswith(("<", os.path.dirname(asyncio.__file__), importlib.__path__[0]))


def awaited(name: str, answer: Any) -> Any:
    """The same, where it can be awaited; TypeError says what the method has to be."""
    if not inspect.isawaitable(answer):
        raise TypeError(f"{name} has to be `async def`: it returned a {type(answer).__name__}, which nothing can await")
    return answer


def tasks_of(environment: type, settings: Any) -> Sequence[Any]:
    """The tasks that the class makes of its settings, checked.

    Raises:
        ValueError: it makes none, or what it returns has no length and no index.
    """
    try:
        tasks = environment.tasks(settings)
    except ValueError as error:  # the environment's own word on its settings, or an accident of a user's
        place = "" if environment.__module__.startswith("nemo_flashrl.") else raised_at(error)
        raise ValueError(f"tasks: {error} ({place})" if place else f"tasks: {error}") from error
    except Exception as error:
        raise ValueError(f"tasks: {in_words(error)}") from error
    if not (hasattr(tasks, "__len__") and hasattr(tasks, "__getitem__")):
        raise ValueError(f"tasks returns a {type(tasks).__name__}: it must have __len__ and __getitem__, as a list has")
    if len(tasks) == 0:
        raise ValueError("there are no tasks: the prompt set is empty")
    return tasks


def task_at(tasks: Sequence[Any], index: int) -> Any:
    """One task of what `tasks_of` returned, which may read a file to make it.

    Raises:
        ValueError: it cannot.
    """
    try:
        return tasks[index]
    except _OURS:
        raise
    except BaseException as error:
        raise ValueError(f"tasks[{index}]: {in_words(error)}") from error


def begun(tasks: Sequence[Any], index: int, make_environment: Callable[[], Environment]) -> tuple[Any, Environment]:
    """A task and a new environment for it; where either cannot be had, an environment whose `reset` says so."""
    try:
        task = task_at(tasks, index)
    except ValueError as error:
        return None, _NotMade(str(error))
    return task, made(make_environment)


def made(make_environment: Callable[[], Environment]) -> Environment:
    """A new environment; where its constructor fails, one whose `reset` says so."""
    try:
        return make_environment()
    except _OURS:
        raise
    except BaseException as error:
        return _NotMade(f"__init__: {in_words(error)}")


class _NotMade:
    def __init__(self, why: str) -> None:
        self._why = why

    async def reset(self, task: Any) -> list[Message]:
        raise EnvironmentFailure(self._why)

    async def close(self) -> None:
        """Nothing is held."""


async def reset(environment: Environment, task: Any) -> list[Message]:
    """The prompt, checked."""
    messages = await awaited("reset", environment.reset(task))
    if not isinstance(messages, list | tuple) or not messages:
        kind = "an empty" if isinstance(messages, list | tuple) else "a"
        raise TypeError(f"the prompt is {kind} {type(messages).__name__}, not {_MESSAGES}")
    for message in messages:
        texts = (message.get("content"), message.get("role", "")) if isinstance(message, dict) else (None,)
        if not all(isinstance(text, str) for text in texts):
            raise TypeError(f"the prompt holds {_shown(message)}, and must be {_MESSAGES}")
    return list(messages)


async def step(environment: Environment, action: str) -> StepResult:
    """The answer to an action, checked, with plain floats and bools for numbers and truth values of other types."""
    result = await awaited("step", environment.step(action))
    if not isinstance(result, StepResult):
        raise TypeError(f"the answer is a {type(result).__name__}, not a StepResult")
    for name, kind in (("observation", str), ("info", dict), ("role", str), ("shaping", dict)):
        if not isinstance(getattr(result, name), kind):
            value = getattr(result, name)
            raise TypeError(f"StepResult.{name} is a {type(value).__name__}, not a {kind.__name__}")
    if not all(isinstance(name, str) for name in result.shaping):
        raise TypeError(f"StepResult.shaping has the names {_shown(list(result.shaping))}, which must all be strings")
    try:
        if result.info:
            json.dumps(result.info)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"the info is not JSON-serializable: {error}") from error
    return StepResult(
        observation=result.observation,
        reward=_number("reward", result.reward),
        done=_truth("done", result.done),
        success=None if result.success is None else _truth("success", result.success),
        info=result.info,
        role=result.role,
        process_reward=_number("process reward", result.process_reward),
        shaping={name: _number(f"shaping term {name}", value) for name, value in result.shaping.items()},
        malformed=_truth("malformed", result.malformed),
    )


def _truth(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):  # a union would be made anew at each call
        raise TypeError(f"StepResult.{name} is a {type(value).__name__}, not a bool")
    return bool(value)


def _number(name: str, value: Any) -> float:
    try:
        # abs would make a number of it, and float of NumPy's would drop a part.
        if not isinstance(value, float) and np.iscomplexobj(value):
            raise TypeError("a complex number")
        within = bool(abs(value) <= LARGEST_REWARD)  # NaN is not
        number = float(value) if within else 0.0
    except (TypeError, ValueError, ArithmeticError) as error:
        raise TypeError(f"the {name} is {_shown(value)}, not a number") from error
    if not within:
        raise ValueError(f"the {name} is {_shown(value)}, not within +-{LARGEST_REWARD:.0f}")
    return number


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
