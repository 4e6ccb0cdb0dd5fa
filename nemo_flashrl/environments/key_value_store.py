"""The rehearsal's task: follow pointers through a key-value store, then say the value at the chain's end.

One episode, with the tokens that the policy sampled on the left and what the store answered on the right:

    Q k 2 9 :                        the prompt
    get ( k 2 9 )                    > k 4 0       key 29 points at key 40
    get ( k 4 0 )                    > v 1 7       key 40 holds the value 17
    answer ( v 1 7 )                 reward 1, done

Small enough for a 100k-parameter model, yet it has what makes agents hard: several turns, a number of them that the
prompt does not tell, a tool's output to copy from, and one reward at the end.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nemo_flashrl.environments.environment import GeneratedTasks, Message, StepResult

NUM_NAMES = 100  # two digits: keys 00..99 and values 00..99
_GET = re.compile(r"get \( k ([0-9]) ([0-9]) \)")
_ANSWER = re.compile(r"answer \( v ([0-9]) ([0-9]) \)")


@dataclass(frozen=True, slots=True)
class Settings:
    """The task's sizes. `(seed, i)` fixes task i; the other fields must agree too."""

    entries: int = 100  # keys in the store; a key that is not there answers `> !`
    value_share: float = 0.35  # of the entries off the chain, those that hold a value; the others point at a key
    max_hops: int = 3  # the chain's `get` calls are uniform in 1..max_hops
    max_calls: int = 6  # `get` calls an episode may make; one more ends it with reward 0
    num_tasks: int = 100_000
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.max_hops <= self.entries <= NUM_NAMES:
            raise ValueError(
                f"key_value_store: 1 <= max_hops <= entries <= {NUM_NAMES} is needed, "
                f"not max_hops={self.max_hops}, entries={self.entries}"
            )
        if not 0 <= self.value_share <= 1:
            raise ValueError(f"key_value_store: value_share={self.value_share} is not a share between 0 and 1")
        if self.max_calls < 1 or self.num_tasks < 0:
            raise ValueError(
                f"key_value_store: max_calls={self.max_calls} must be at least 1, num_tasks={self.num_tasks} at least 0"
            )


@dataclass(frozen=True, slots=True)
class Entry:
    """What one key holds."""

    kind: str  # "k": a pointer to a key | "v": a value
    number: int  # 0..99

    @property
    def text(self) -> str:
        return f"{self.kind} {digits(self.number)}"


@dataclass(frozen=True, slots=True)
class Task:
    """One question and the store that it is asked of."""

    key: int  # where the chain begins
    answer: int  # the value at its end
    hops: int  # `get` calls from the key to the value
    store: Mapping[int, Entry]  # key -> entry

    @property
    def prompt(self) -> str:
        return f"Q k {digits(self.key)} :"


def digits(number: int) -> str:
    """Two decimal digits as two tokens: 7 -> "0 7"."""
    return f"{number // 10} {number % 10}"


def make_task(settings: Settings, index: int) -> Task:
    """Task `index` of the set that `settings` describes; the same arguments give the same task."""
    random = np.random.default_rng([settings.seed, index])
    keys = random.permutation(NUM_NAMES)[: settings.entries].tolist()
    is_value = random.random(settings.entries) < settings.value_share
    values = random.integers(0, NUM_NAMES, settings.entries).tolist()
    pointers = random.integers(0, settings.entries, settings.entries).tolist()
    store = {
        key: Entry("v", value) if holds_value else Entry("k", keys[pointer])
        for key, holds_value, value, pointer in zip(keys, is_value, values, pointers, strict=True)
    }
    # The keys are in random order, so the first `hops` of them are a random chain without a loop.
    hops = int(random.integers(1, settings.max_hops + 1))
    for here, there in zip(keys[: hops - 1], keys[1:hops], strict=True):
        store[here] = Entry("k", there)
    answer = values[hops - 1]
    store[keys[hops - 1]] = Entry("v", answer)
    return Task(key=keys[0], answer=answer, hops=hops, store=store)


class KeyValueStore:
    """One episode. Only `get ( k d d )` and `answer ( v d d )` are actions; anything else ends it with reward 0."""

    Settings = Settings

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._task: Task | None = None
        self._calls = 0

    @classmethod
    def tasks(cls, settings: Settings) -> Sequence[Task]:
        return GeneratedTasks(settings.num_tasks, functools.partial(make_task, settings))

    async def reset(self, task: Task) -> list[Message]:
        self._task, self._calls = task, 0
        return [{"role": "user", "content": task.prompt}]

    async def step(self, action: str) -> StepResult:
        assert self._task is not None, "step before reset"
        if match := _ANSWER.fullmatch(action):
            solved = int(match[1] + match[2]) == self._task.answer
            return self._end("answered", solved)
        if not (match := _GET.fullmatch(action)):
            return self._end("malformed", False)
        self._calls += 1
        if self._calls > self._settings.max_calls:
            return self._end("too_many_calls", False)
        entry = self._task.store.get(int(match[1] + match[2]))
        return StepResult(observation=f"> {entry.text}" if entry else "> !")

    async def close(self) -> None:
        self._task = None

    def _end(self, outcome: str, solved: bool) -> StepResult:
        info = {"outcome": outcome, "hops": self._task.hops, "calls": self._calls}
        return StepResult(reward=float(solved), done=True, success=solved, info=info, malformed=outcome == "malformed")
