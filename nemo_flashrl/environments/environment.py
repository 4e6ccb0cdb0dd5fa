"""What an episode needs of a task, and task lists that are made up one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

T = TypeVar("T")
Message = dict[str, str]  # {"role": ..., "content": ...}


@dataclass(frozen=True, slots=True)
class StepResult:
    """The environment's answer to one action; `reward` counts for this step, the episode's is their sum."""

    observation: str = ""
    reward: float = 0.0
    done: bool = False
    success: bool | None = None  # set on the last step where "solved" is known; else reward > 0 decides
    info: dict[str, Any] = field(default_factory=dict)  # for the trajectory log: what JSON can hold
    role: str = "user"  # of the message that shows the observation: "tool" where the chat template knows it
    process_reward: float = 0.0  # of this step, beside `reward`; for a run that gives turns advantages of their own
    shaping: dict[str, float] = field(default_factory=dict)  # by name, summed over steps; for a run that uses them
    malformed: bool = False  # the action was none: a run may leave such an episode out of training


@runtime_checkable
class Environment(Protocol):
    """One episode of a task. The class makes its tasks; an instance plays one of them.

    A class declares its settings beside it as `Settings`, a dataclass with defaults, and is built as
    `EnvironmentClass(settings)` once per episode.
    """

    Settings: type

    @classmethod
    def tasks(cls, settings: Any) -> Sequence[Any]:
        """The training set: anything with a length and an index; an element is handed to `reset`."""
        ...

    async def reset(self, task: Any) -> list[Message]:
        """Begin; the messages are the prompt."""
        ...

    async def step(self, action: str) -> StepResult:
        """Answer the policy's decoded action."""
        ...

    async def close(self) -> None:
        """Called once when the episode has ended, whatever ended it."""
        ...


class GeneratedTasks(Sequence[T], Generic[T]):
    """`count` tasks; `make(index)` makes one each time it is asked for, and always the same one.

    `fields`, name -> function of an index, tell a task's field without making the task.
    """

    def __init__(self, count: int, make: Callable[[int], T], fields: Mapping[str, Callable[[int], Any]] = {}) -> None:
        self._count = count
        self._make = make
        self.fields = fields

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> T:
        if not 0 <= index < self._count:
            raise IndexError(f"task {index} of {self._count}")
        return self._make(index)
