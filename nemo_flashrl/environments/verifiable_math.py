"""Single-turn mathematics with an answer that can be checked: a JSONL file, or arithmetic that is made up.

One episode: the question, the policy's reasoning with its answer in \\boxed{}, reward 1 or 0.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nemo_flashrl.environments.answers import boxed_answer, is_equal
from nemo_flashrl.environments.environment import GeneratedTasks, Message, StepResult

_SIGNS = ("+", "-", "*")


@dataclass  # not frozen: OmegaConf would let nobody set a field of it where it is part of other settings
class Settings:
    """Which questions; `(seed, i)` fixes generated question i."""

    path: str | None = field(default=None, metadata={"path": True})  # JSONL file; None: generated arithmetic
    question_field: str = "question"
    answer_field: str = "answer"
    level_field: str | None = None  # of the file: each question's class, `level` of a task; None: it has none
    instruction: str = "Think step by step, then give the final answer in \\boxed{}."
    num_tasks: int = 10_000  # of generated arithmetic
    terms: int = 3
    levels: list[int] = field(default_factory=list)  # in place of `terms`: task i has the i-th, in turn; its `level`
    largest: int = 99
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_tasks < 1 or min([self.terms, *self.levels]) < 2 or self.largest < 1:
            raise ValueError(
                f"verifiable_math: num_tasks={self.num_tasks} must be at least 1, terms={self.terms} and all of "
                f"levels={self.levels} at least 2, largest={self.largest} at least 1"
            )


@dataclass(frozen=True, slots=True)
class Task:
    """A question and its answer."""

    question: str
    answer: str
    level: str | None = None  # its class: of a file's `level_field`; the number of terms of generated arithmetic


def make_task(settings: Settings, index: int) -> Task:
    """Sums and products; `(settings.seed, index)` fixes them."""
    random = np.random.default_rng([settings.seed, index])
    terms = _terms(settings, index)
    numbers = random.integers(1, settings.largest + 1, terms).tolist()
    signs = random.integers(0, len(_SIGNS), terms - 1).tolist()
    text = str(numbers[0]) + "".join(f" {_SIGNS[s]} {n}" for s, n in zip(signs, numbers[1:], strict=True))
    products = [numbers[0]]
    for sign, number in zip(signs, numbers[1:], strict=True):
        if _SIGNS[sign] == "*":
            products[-1] *= number
        else:
            products.append(number if _SIGNS[sign] == "+" else -number)
    return Task(f"What is {text}?", str(sum(products)), str(terms))


def _terms(settings: Settings, index: int) -> int:
    return settings.levels[index % len(settings.levels)] if settings.levels else settings.terms


def read_tasks(settings: Settings) -> list[Task]:
    """The questions of `settings.path`.

    Raises:
        ValueError: no such file, or a line that is not an object with a question and an answer.
    """
    path = Path(settings.path)
    if not path.is_file():
        raise ValueError(f"environment.settings.path={settings.path!r}: there is no such file")
    tasks = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):  # U+2028 ends no line
        if not line.strip():
            continue
        try:
            # Numbers stay as they are written: Python's floats would turn 0.00001 into 1e-05 and round long decimals.
            record = json.loads(line, parse_float=str, parse_int=str)
            level = None if settings.level_field is None else _text(record, settings.level_field)
            tasks.append(Task(_text(record, settings.question_field), _answer(record, settings.answer_field), level))
        except (ValueError, KeyError, TypeError) as error:
            names = [settings.question_field, settings.answer_field, settings.level_field]
            needed = " and ".join(repr(name) for name in names if name is not None)
            raise ValueError(
                f"{path}:{number}: a JSON object with {needed} is needed ({type(error).__name__}: {error})"
            ) from error
    return tasks


def _text(record: dict[str, Any], name: str) -> str:
    value = record[name]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name}={json.dumps(value):.100} is neither text nor a number")
    return value


def _answer(record: dict[str, Any], name: str) -> str:
    answer = _text(record, name)
    if boxed_answer(answer) == "":
        raise ValueError(f"{name}={json.dumps(answer):.100} is an empty box")
    return answer


class VerifiableMath:
    """One question."""

    Settings = Settings

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._task: Task | None = None

    @classmethod
    def tasks(cls, settings: Settings) -> Sequence[Task]:
        if settings.path:
            return read_tasks(settings)
        fields = {"level": functools.partial(_terms, settings)}
        return GeneratedTasks(settings.num_tasks, functools.partial(make_task, settings), fields)

    async def reset(self, task: Task) -> list[Message]:
        self._task = task
        return [{"role": "user", "content": f"{task.question}\n{self._settings.instruction}"}]

    async def step(self, action: str) -> StepResult:
        answer = boxed_answer(action)
        solved = answer is not None and await is_equal(answer, boxed_answer(self._task.answer) or self._task.answer)
        outcome = "no_answer" if answer is None else "right" if solved else "wrong"
        info = {"outcome": outcome}
        return StepResult(reward=float(solved), done=True, success=solved, info=info, malformed=answer is None)

    async def close(self) -> None:
        self._task = None
