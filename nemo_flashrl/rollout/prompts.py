"""Which task comes next, and how many rollouts it gets.

The order is seeded and survives a restart without losing or repeating a prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from nemo_flashrl.algorithms.schedules import FixedGroupSize


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


class PromptGroupSizes(FixedGroupSize):
    """How many rollouts each prompt gets, from what the groups of its task came to before.

    A task's first group has `start` rollouts. After a group of equal rewards, which teaches nothing, its next one has
    half as many; after any other, twice as many; never fewer than `lowest` or more than `highest`.

    The sizes are lowest, 2 lowest, 4 lowest, ... highest, and the highest divides the batch. So what a batch lacks is
    always a multiple of the lowest, and groups of B trajectories or more always hold some of exactly B (`Groups.take`).
    The last prompts of each B trajectories get at most what is left of these; that so small a group's rewards are equal
    says little, and its task's size stays.

    >>> sizes = PromptGroupSizes(8, lowest=2, highest=16, batch_size=32)
    >>> [sizes.begin(prompt, task) for prompt, task in enumerate((70, 71, 72))]
    [8, 8, 8]
    >>> sizes.trained({0: [1.0] * 8, 1: [0.0] * 7 + [1.0]})
    >>> [sizes.begin(prompt, task) for prompt, task in enumerate((70, 71, 70, 71), start=3)]  # 8 are left of 32
    [4, 4, 4, 16]

    Args:
        start: rollouts of a task that was not trained on yet; one of the sizes.
        lowest: at least 2.
        highest: lowest times a power of 2.
        batch_size: trajectories of a step, a multiple of `highest`.

    Raises:
        ValueError: sizes that do not fit each other, or the batch.
    """

    def __init__(self, start: int, *, lowest: int, highest: int, batch_size: int) -> None:
        super().__init__(start)
        self.sizes = [lowest << power for power in range(max(highest // max(lowest, 1), 1).bit_length())]
        if lowest < 2 or highest != self.sizes[-1]:
            raise ValueError(
                f"group_size.max={highest}: must be group_size.min times a power of 2, and group_size.min ({lowest}) "
                "at least 2, as an advantage compares rollouts of one prompt"
            )
        if batch_size % highest:
            raise ValueError(
                f"rollout.batch_size={batch_size}: must be a multiple of group_size.max ({highest}), so that groups of "
                "different sizes make up exactly a batch"
            )
        if start not in self.sizes:
            raise ValueError(
                f"algorithm.settings.group_size={start}: with group_size.min={lowest} and group_size.max={highest} it "
                f"must be one of {', '.join(map(str, self.sizes))}"
            )
        self._batch_size = batch_size
        self._begun = 0  # trajectories of the groups that were begun and not dropped
        self._tasks: dict[int, int] = {}  # prompt index -> task index, of the groups that have no end yet
        self._of_task: dict[int, int] = {}  # task index -> the size of its next group

    @property
    def largest(self) -> int:
        """The most that a prompt can get."""
        return self.sizes[-1]

    def begin(self, prompt_index: int, task_index: int) -> int:
        """The rollouts of a prompt that is about to be played."""
        room = self._batch_size - self._begun % self._batch_size
        wanted = self._of_task.get(task_index, self.value)
        size = max(size for size in self.sizes if size <= min(wanted, room))
        self._begun += size
        self._tasks[prompt_index] = task_index
        return size

    def dropped(self, prompt_index: int, rewards: Sequence[float], reason: str) -> None:
        """Others are begun in place of these trajectories; a group that was dropped as tied is one of equal rewards."""
        self._begun -= len(rewards)
        task_index = self._tasks.pop(prompt_index)
        if reason == "tied":
            self._move(task_index, rewards)

    def trained(self, groups: Mapping[int, Sequence[float]]) -> None:
        """Move on the tasks of these groups."""
        for prompt_index, rewards in groups.items():
            self._move(self._tasks.pop(prompt_index), rewards)

    def _move(self, task_index: int, rewards: Sequence[float]) -> None:
        size = self._of_task.get(task_index, self.value)
        if min(rewards) < max(rewards):
            self._of_task[task_index] = min(2 * size, self.sizes[-1])
        elif len(rewards) >= size:
            self._of_task[task_index] = max(size // 2, self.sizes[0])

    def metrics(self, groups: Sequence[Sequence[float]]) -> dict[str, float]:
        """What groups of equal rewards would have cost more, each with `start` rollouts."""
        tied = [len(rewards) for rewards in groups if min(rewards) == max(rewards)]
        return {"tied_trajectories_saved": float(sum(self.value - size for size in tied))}

    def state_dict(self) -> dict[str, object]:
        """What a checkpoint keeps: the size of each task's next group."""
        return {"tasks": sorted(self._of_task.items())}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore that state; sizes that are none of this run's are left at the start's."""
        self._of_task = {int(task): int(size) for task, size in state.get("tasks", ()) if size in self.sizes}
