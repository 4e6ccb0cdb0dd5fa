"""Training sets that are made up, task by task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class GeneratedTasks(Sequence[T], Generic[T]):
    """`count` tasks; `make(index)` makes one each time it is asked for, and always the same one."""

    def __init__(self, count: int, make: Callable[[int], T]) -> None:
        self._count = count
        self._make = make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> T:
        if not 0 <= index < self._count:
            raise IndexError(f"task {index} of {self._count}")
        return self._make(index)
