"""What an environment may do wrong before a run begins, and the one line that each comes to."""

from __future__ import annotations

import asyncio
import functools
import threading
from dataclasses import dataclass
from typing import Any

import pytest
from doubles import TOKENIZER, ScriptedEnvironment, TornTasks

from nemo_flashrl.config import RunConfig, load
from nemo_flashrl.config.schema import PluginConfig
from nemo_flashrl.preflight import environment as preflight_environment
from nemo_flashrl.preflight.environment import check_environment

RELEASE = threading.Event()


@dataclass
class Settings:
    num_tasks: int = 20
    seed: int = 0


class Sound(ScriptedEnvironment):
    """Task i of seed s asks for key (s, i)."""

    Settings = Settings

    def __init__(self, settings: Settings) -> None:
        super().__init__([])

    @classmethod
    def tasks(cls, settings: Settings) -> Any:
        return [f"Q k {settings.seed} {index % 10} :" for index in range(settings.num_tasks)]

    async def reset(self, task: str) -> Any:
        self.prompt = task
        return await super().reset(task)


def config_of(*overrides: str) -> RunConfig:
    config = load("rehearsal", ["output=x", "model.path=m", *overrides])
    config.environment = PluginConfig("my.Own", {"num_tasks": 20})
    return config


def check(*overrides: str, **members: Any) -> Any:
    return check_environment(config_of(*overrides), type("Own", (Sound,), members), TOKENIZER)


def answers(value: Any) -> dict[str, Any]:
    async def reset(self: Any, task: Any) -> Any:
        return value

    return {"reset": reset}


async def hang(self: Any, *arguments: Any) -> None:
    await asyncio.sleep(1000)


async def block(self: Any, *arguments: Any) -> None:
    RELEASE.wait(60)


async def fail(self: Any, *arguments: Any) -> None:
    raise OSError("busy")


def test_a_sound_one() -> None:
    settings, tasks = check()
    assert settings == Settings()
    assert tasks[1] == "Q k 0 1 :"


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"tasks": classmethod(lambda *_: None)}, "tasks returns a NoneType: it must have __len__ and __getitem__"),
        ({"tasks": classmethod(lambda *_: iter([]))}, "tasks returns a list_iterator: it must have __len__"),
        ({"tasks": classmethod(lambda *_: 1 // 0)}, "tasks: ZeroDivisionError: integer division or modulo by zero"),
        ({"tasks": classmethod(lambda *_: [])}, "there are no tasks: the prompt set is empty"),
        ({"__init__": lambda *_: 1 // 0}, "__init__: ZeroDivisionError: integer division or modulo by zero"),
        (answers([]), "reset of task 0: TypeError: the prompt is an empty list, not a list of messages like"),
        (answers("Q"), "reset of task 0: TypeError: the prompt is a str, not a list of messages like {'role': 'user'"),
        (answers([{"role": "user"}]), "reset of task 0: TypeError: the prompt holds {'role': 'user'}, and must be"),
        ({"reset": fail}, "reset of task 0: OSError: busy"),
        ({"reset": hang}, "reset of task 0: timed out after 0.2 s (rollout.step_timeout)"),
        ({"close": fail}, "close after task 0: OSError: busy"),
        ({"close": hang}, "close after task 0: timed out after 0.2 s (rollout.step_timeout)"),
        ({"reset": fail, "close": hang}, "reset of task 0: OSError: busy"),
        (
            {"reset": block},
            "reset of task 0 blocks the event loop for more than 0.4 s (rollout.step_timeout=0.2): use await",
        ),
        (
            {"close": block},
            "close after task 0 blocks the event loop for more than 0.4 s (rollout.step_timeout=0.2): use await",
        ),
        ({"Settings": None}, "Settings is not a dataclass"),
    ],
)
def test_what_it_does_wrong_is_one_line(members: dict, said: str, monkeypatch) -> None:
    monkeypatch.setattr(preflight_environment, "_BLOCKED", 0.2 if block in members.values() else 60.0)
    monkeypatch.setattr("nemo_flashrl.environments.guard._GRACE", 0.01)
    seconds = 0.2 if {hang, block} & {m for m in members.values() if callable(m)} else 60.0
    with pytest.raises(ValueError) as refused:
        check(f"rollout.step_timeout={seconds}", **members)
    RELEASE.set()
    RELEASE.clear()
    assert str(refused.value).startswith(f"environment.name='my.Own': {said}")
    assert "\n" not in str(refused.value)


def longer(number: int) -> dict[str, Any]:
    """The first `number` prompts have 500 tokens."""

    async def reset(self: Any, task: str) -> Any:
        return [{"role": "user", "content": "k " * 500 if int(task.split()[3]) < number else task}]

    return {"reset": reset}


def test_prompts_without_room_follow_on_too_long() -> None:
    limits = ("model.context_length=128", "rollout.max_tokens_per_turn=8")
    for tasks, *overrides in ((1,), (8, "batching.on_too_long=drop"), (8, "batching.on_too_long=truncate")):
        said = rf"the prompt of task 0 has 500 tokens .*model.context_length=128, .*\({tasks} of the first 8 are too"
        with pytest.raises(ValueError, match=said):
            check(*limits, *overrides, **longer(tasks))
    check(*limits, "batching.on_too_long=drop", **longer(7))


def test_held_out_tasks_are_looked_at_too(recwarn) -> None:
    asked = ("evaluation.every_steps=1", "evaluation.settings={seed: 5}", "model.context_length=128")
    check(*asked)
    assert not recwarn.list
    with pytest.raises(ValueError, match=r"evaluation.settings=\{'num_tasks': 0\}: there are no tasks"):
        check("evaluation.every_steps=1", "evaluation.settings={num_tasks: 0}")
    check("evaluation.every_steps=1", "evaluation.settings={num_tasks: 1}")
    assert "the first 1 held-out prompts are also training prompts" in str(recwarn.pop(UserWarning).message)

    async def reset(self: Any, task: str) -> Any:
        return [{"role": "user", "content": "k " * 500 if task.split()[2] == "5" else task}]

    with pytest.raises(ValueError, match="the prompt of held-out task 0 has 500 tokens"):
        check(*asked, reset=reset)


def test_a_task_that_cannot_be_read() -> None:
    """Of training it is one episode's end, later; held-out tasks are all read now."""
    torn = {"tasks": classmethod(lambda cls, settings: TornTasks(Sound.tasks(settings)))}
    check(**torn)
    where = r"evaluation.settings=\{'seed': 5\}: tasks\[9\]"
    with pytest.raises(ValueError, match=rf"{where}: OSError: page 9 is torn \(.*/doubles.py:\d+\)$"):
        check("evaluation.every_steps=1", "evaluation.settings={seed: 5}", **torn)


def test_a_tokenizer_that_does_not_know_the_text_is_told_of_once(recwarn) -> None:
    check(**answers([{"role": "user", "content": "Q k : Was ist das"}]))  # 3 of 6 are known: half is not over half
    assert not recwarn.list
    check(**answers([{"role": "user", "content": "Q k Was ist das"}]))
    [warned] = [str(warning.message) for warning in recwarn.list]
    assert "environment.name='my.Own': 3 of the 5 tokens of the prompt of task 0 are " in warned
    assert "model.path='m'" in warned


@pytest.mark.parametrize("member", ["reset", "step", "close"])
def test_a_method_that_is_not_async_is_refused_with_its_place(member: str) -> None:
    def plain(self: Any, *arguments: Any) -> None:
        RELEASE.wait(0)

    line = plain.__code__.co_firstlineno
    with pytest.raises(ValueError, match=rf"'my.Own': {member} has to be `async def` \({__file__}:{line}\)"):
        check(**{member: plain})


def test_a_decorated_method_may_hide_that_it_is_async() -> None:
    def logged(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(*arguments: Any) -> Any:
            return function(*arguments)

        return wrapper

    check(step=logged(Sound.step))


def test_an_error_in_tasks_or_reset_names_the_users_line() -> None:
    async def reset(self: Any, task: Any) -> Any:
        return {}["prompt"]

    line = reset.__code__.co_firstlineno + 1
    with pytest.raises(ValueError, match=rf"reset of task 0: KeyError: 'prompt' \({__file__}:{line}\)"):
        check(reset=reset)
