"""Which task comes next: a seeded order of prompts that survives a restart without losing or repeating one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np


class PromptSource(Protocol):
    """What the collector asks for tasks; `PromptStream` and `Curriculum` are two."""

    def next(self) -> tuple[int, int]:
        """(prompt index, task index); indices of new prompts ascend from 0 over the whole run."""
        ...

    def finish(self, prompt_index: int) -> None:
        """The prompt was dropped for good."""
        ...

    def trained(self, success: Mapping[int, float]) -> None:
        """The weights hold what these prompts teach, each solved in that share of its trajectories."""
        ...

    def metrics(self) -> dict[str, float]:
        """What a step's metrics say of it."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where `state` was taken."""
        ...


class PromptStream:
    """Prompt indices 0, 1, 2, ... over as many epochs as are asked for, each with the task that it stands for.

    An epoch is a permutation of all tasks, fixed by `(seed, epoch)`. A prompt handed out is unfinished until
    `finish` is called with its index; those unfinished when the state was saved are the first to come after a resume.
    """

    def __init__(self, num_tasks: int, seed: int = 0) -> None:
        """
        Raises:
            ValueError: there are no tasks.
        """
        if num_tasks < 1:
            raise ValueError(f"the prompt set is empty: num_tasks={num_tasks}, at least one task is needed")
        self._num_tasks = num_tasks
        self._seed = seed
        self._position = 0  # the next new prompt index
        self._unfinished: set[int] = set()
        self._again: deque[int] = deque()  # unfinished before a resume, not yet handed out again
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def next(self) -> tuple[int, int]:
        """(prompt index, task index)."""
        if self._again:
            prompt_index = self._again.popleft()
        else:
            prompt_index = self._position
            self._position += 1
            self._unfinished.add(prompt_index)
        return prompt_index, self.task_index(prompt_index)

    def task_index(self, prompt_index: int) -> int:
        """The task, in 0..num_tasks-1, that a prompt index stands for."""
        epoch, place = divmod(prompt_index, self._num_tasks)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self._num_tasks)
            self._epoch = epoch
        return int(self._order[place])

    def trained(self, prompt_indices: Iterable[int]) -> None:
        """These prompts have been used; how they ended changes nothing."""
        for prompt_index in prompt_indices:
            self.finish(prompt_index)

    def metrics(self) -> dict[str, float]:
        """None."""
        return {}

    def finish(self, prompt_index: int) -> None:
        """The prompt has been used, or dropped for good."""
        assert prompt_index in self._unfinished, f"prompt {prompt_index} is not in flight"
        self._unfinished.remove(prompt_index)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and a list: the position and the prompts in flight."""
        return {
            "num_tasks": self._num_tasks,
            "seed": self._seed,
            "position": self._position,
            "unfinished": sorted(self._unfinished),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where `state` was taken.

        Raises:
            ValueError: it belongs to another number of tasks or another seed, whose prompt indices mean other tasks.
        """
        if "classes" in state:
            raise ValueError(
                "curriculum.mode=none: the checkpoint is of a run with a curriculum or mixture; set it back"
            )
        for name, own in (("num_tasks", self._num_tasks), ("seed", self._seed)):
            if state[name] != own:
                raise ValueError(
                    f"prompt stream: the saved state has {name}={state[name]}, this run has {own}; "
                    f"resume with {name}={state[name]} or start a new run"
                )
        self._position = int(state["position"])
        self._unfinished = {int(index) for index in state["unfinished"]}
        self._again = deque(sorted(self._unfinished))
