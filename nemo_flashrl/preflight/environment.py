"""What can be refused of an environment before a model is built: its class, its tasks, its first prompts.

An environment is not ours and may do anything: raise, return what is no answer, hang, block its thread. Each comes out
as a ValueError of one line.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import queue
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from nemo_flashrl.batching.planner import usable_context
from nemo_flashrl.config import RunConfig, settings_of
from nemo_flashrl.environments.guard import EnvironmentFailure, ask, in_words, made, reset, tasks_of
from nemo_flashrl.rollout.chat_tokens import Codec
from nemo_flashrl.rollout.from_config import held_out_tasks, long_prompts

MEMBERS = ("Settings", "tasks", "reset", "step", "close")
CHECKED_PROMPTS = 8  # enough to see a context that no prompt fits; later ones are met by the agent loop
_BLOCKED = 5.0  # seconds beyond a call's own time-out after which it holds its thread
Prompts = list[list[int]]


def check_environment(config: RunConfig, environment: type, tokenizer: Any) -> tuple[Any, Sequence[Any]]:
    """The settings and tasks of a class that plays episodes, by its first prompts, those of held-out tasks too."""
    name = config.environment.name
    missing = [member for member in MEMBERS if not hasattr(environment, member)]
    if missing:
        raise ValueError(f"environment.name={name!r} is not an environment: it lacks {', '.join(missing)}")
    for member in ("reset", "step", "close"):
        function = inspect.unwrap(getattr(environment, member))
        if inspect.isfunction(function) and not inspect.iscoroutinefunction(function):
            place = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
            raise ValueError(f"environment.name={name!r}: {member} has to be `async def` ({place})")
    if not dataclasses.is_dataclass(environment.Settings):
        raise ValueError(f"environment.name={name!r}: Settings is not a dataclass")
    settings = settings_of(environment, config.environment.settings, "environment")
    try:
        tasks = tasks_of(environment, settings)
    except ValueError as error:
        raise ValueError(f"environment.name={name!r}: {error}") from error
    prompts = _first_prompts(config, environment, settings, tasks, tokenizer)
    _check_lengths(config, prompts, "task")
    _warn_of_unknown_tokens(config, prompts, tokenizer)
    if config.evaluation.every_steps:
        held_settings, held = held_out_tasks(config, environment)
        held_prompts = _first_prompts(config, environment, held_settings, held, tokenizer)
        _check_lengths(config, held_prompts, "held-out task")
        _warn_of_same_tasks(config, prompts, held_prompts)
    return settings, tasks


def _first_prompts(
    config: RunConfig, environment: type, settings: Any, tasks: Sequence[Any], tokenizer: Any
) -> Prompts:
    """Token ids of the first prompts, in a thread of its own as in a run: what holds it for ever is left behind."""
    codec, timeout = Codec(tokenizer), config.rollout.step_timeout
    where = f"environment.name={config.environment.name!r}"
    began: queue.SimpleQueue[str] = queue.SimpleQueue()  # the names of calls; the empty one is the end
    played: Future[Prompts] = Future()

    async def play() -> None:
        try:
            played.set_result(
                [
                    await _prompt(lambda: environment(settings), tasks, index, codec, timeout, began.put)
                    for index in range(min(CHECKED_PROMPTS, len(tasks)))
                ]
            )
        except BaseException as error:
            played.set_exception(error)
        finally:
            began.put("")  # before the loop is closed, which waits for threads that an environment has begun

    threading.Thread(target=lambda: asyncio.run(play()), name="first prompts", daemon=True).start()
    call = "tasks"
    while call:
        try:
            call = began.get(timeout=min(timeout + _BLOCKED, threading.TIMEOUT_MAX))
        except queue.Empty:
            raise ValueError(
                f"{where}: {call} blocks the event loop for more than {timeout + _BLOCKED:g} s (rollout.step_timeout="
                f"{timeout:g}): use await, or asyncio.to_thread for blocking code"
            ) from None
    try:
        return played.result()
    except EnvironmentFailure as failure:
        raise ValueError(f"{where}: {failure}") from failure


async def _prompt(
    make: Callable[[], Any],
    tasks: Sequence[Any],
    index: int,
    codec: Codec,
    timeout: float,
    began: Callable[[str], None],
) -> list[int]:
    """The prompt of one task; what its reset does wrong goes before what close does."""
    failure: EnvironmentFailure | None = None
    ids: list[int] = []
    began(f"__init__ for task {index}")
    environment = made(make)
    began(name := f"reset of task {index}")
    try:
        ids = codec.prompt_ids(codec.begin(await ask(name, timeout, reset, environment, tasks[index])))
    except EnvironmentFailure as error:
        failure = error
    except Exception as error:  # of the tasks, or what a chat template says of the messages
        failure = EnvironmentFailure(f"{name}: {in_words(error)}")
    began(name := f"close after task {index}")
    try:
        await ask(name, timeout, environment.close)
    except EnvironmentFailure as error:
        failure = failure or error
    if failure is not None:
        raise failure
    return ids


def _check_lengths(config: RunConfig, prompts: Prompts, tasks: str) -> None:
    """Where prompts that leave no room are left out, one that fits is enough to begin."""
    room = usable_context(config.model.context_length, config.batching.context_margin)
    too_long = [index for index, ids in enumerate(prompts) if len(ids) >= room]
    if too_long and (config.batching.on_too_long == "error" or len(too_long) == len(prompts)):
        what = long_prompts(config, tasks).what(too_long[0], len(prompts[too_long[0]]))
        raise ValueError(f"{what} ({len(too_long)} of the first {len(prompts)} are too long)")


def _warn_of_unknown_tokens(config: RunConfig, prompts: Prompts, tokenizer: Any) -> None:
    for index, ids in enumerate(prompts):
        if (unknown := ids.count(tokenizer.unk_token_id)) > len(ids) / 2:
            warnings.warn(
                f"environment.name={config.environment.name!r}: {unknown} of the {len(ids)} tokens of the prompt of "
                f"task {index} are {tokenizer.unk_token!r}: the tokenizer of model.path={config.model.path!r} does not "
                "cover this text, and the policy cannot read it",
                stacklevel=3,
            )
            return


def _warn_of_same_tasks(config: RunConfig, prompts: Prompts, held_out: Prompts) -> None:
    known = {tuple(ids) for ids in prompts}
    if len(known) == len(prompts) and all(tuple(ids) in known for ids in held_out):  # else a prompt tells no task
        warnings.warn(
            f"evaluation.settings={config.evaluation.settings}: the first {len(held_out)} held-out prompts are also "
            "training prompts: set what selects other tasks, such as another seed or path",
            stacklevel=3,
        )
