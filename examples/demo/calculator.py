"""A chat model keeps accounts with a calculator: a call for each line, the result of one is where the next begins.

    384 plus 77       the prompt, after an example of such a conversation
    calc(384 + 77)    what the policy has to write
    461 minus 150     the calculator's answer, and what comes next
    calc(461 - 150)
    311 times 3
    calc(311 * 3)     the last line: reward 1 if the result is right, which it is if every call was

There is no reward before the end. A wrong call changes all that follows; an action that is no call ends the episode.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from nemo_flashrl.environments import Message, StepResult
from nemo_flashrl.environments.environment import GeneratedTasks

WORDS = {"+": "plus", "-": "minus", "*": "times"}
APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul}
CALL = re.compile(r"calc\((-?\d{1,9}) ([-+*]) (\d{1,9})\)")
PROMPT = (
    {"role": "system", "content": "Use the calculator."},
    {"role": "user", "content": "23 plus 41"},
    {"role": "assistant", "content": "calc(23 + 41)"},
    {"role": "user", "content": "64 minus 38"},
    {"role": "assistant", "content": "calc(64 - 38)"},
)


@dataclass(frozen=True)
class Settings:
    """A task is made of `seed` and its index alone: tasks of another seed are held out."""

    operations: int = 3  # lines of one account
    largest: int = 999
    num_tasks: int = 100_000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.operations < 1 or self.largest < 1:
            raise ValueError(f"calculator: operations={self.operations} and largest={self.largest} must be at least 1")


@dataclass(frozen=True, slots=True)
class Account:
    """A number, and what is to be done with it."""

    first: int
    operations: tuple[tuple[str, int], ...]  # sign, number

    def __str__(self) -> str:
        return ", ".join([str(self.first), *(f"{WORDS[sign]} {number}" for sign, number in self.operations)])

    def values(self) -> list[int]:
        """The value before the first line and after each."""
        values = [self.first]
        for sign, number in self.operations:
            values.append(APPLY[sign](values[-1], number))
        return values

    def calls(self) -> list[str]:
        """The right one for each line."""
        pairs = zip(self.values(), self.operations, strict=False)
        return [f"calc({value} {sign} {number})" for value, (sign, number) in pairs]


class Calculator:
    """One account."""

    Settings = Settings

    def __init__(self, settings: Settings) -> None:
        self._account: Account | None = None
        self._line = 0

    @classmethod
    def tasks(cls, settings: Settings) -> Sequence[Account]:
        return GeneratedTasks(settings.num_tasks, lambda index: _account(settings, index))

    async def reset(self, task: Account) -> list[Message]:
        self._account, self._line = task, 0
        return [*PROMPT, {"role": "user", "content": self._shown(task.first)}]

    async def step(self, action: str) -> StepResult:
        call = CALL.fullmatch(action.strip())
        if call is None:
            return self._end("no_call", malformed=True)
        value = APPLY[call[2]](int(call[1]), int(call[3]))
        self._line += 1
        if self._line < len(self._account.operations):
            return StepResult(self._shown(value))
        return self._end("right" if value == self._account.values()[-1] else "wrong")

    async def close(self) -> None:
        """There is nothing to free."""

    def _shown(self, value: int) -> str:
        sign, number = self._account.operations[self._line]
        return f"{value} {WORDS[sign]} {number}"

    def _end(self, outcome: str, *, malformed: bool = False) -> StepResult:
        solved = outcome == "right"
        info = {"outcome": outcome, "calls": self._line}
        return StepResult(reward=float(solved), done=True, success=solved, info=info, malformed=malformed)


def _account(settings: Settings, index: int) -> Account:
    draw = random.Random(f"{settings.seed} {index}")
    first, operations = draw.randint(1, settings.largest), []
    for _ in range(settings.operations):
        sign = draw.choice("+-*")
        operations.append((sign, draw.randint(2, 9) if sign == "*" else draw.randint(1, settings.largest)))
    return Account(first, tuple(operations))
