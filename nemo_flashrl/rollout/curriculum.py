"""A prompt source that mixes classes of tasks; for the first part of a run it may follow how well each is solved.

Each prompt is drawn: first a class of tasks by its share, then the next task of that class in a seeded order that
begins again when the class is through. So there is no epoch over all tasks; a prompt index still stands for one task,
and those that were unfinished in a checkpoint come first after a resume, with the same task.

    p_c = (solved + 1) / (played + 2)         of the class, counts fading by DECAY with each prompt of it
    share_c = floor * m_c + (1 - floor) * m_c w_c / sum_k m_k w_k

    variance     w_c = p_c (1 - p_c)             what is neither solved nor hopeless comes more often
    threshold    w_c = max(0, threshold - p_c)   what is solved less often than that does, the further below the more

p (1 - p) is the variance of a reward of 0 or 1: what a group of rollouts can learn from (Foster and Foerster 2025). m
is the fixed mixture, all there is after the first part, or where every class has reached the threshold; the floor keeps
every class in play, so that easy tasks cannot crowd out hard ones, nor hopeless ones the others.

Three classes of equal m with p = .8, .5 and .1, floor .1, threshold .6:

    variance     w = .16, .25, .09 (sum .5)      shares 1/30 + .9 (.32, .5, .18)  = .321, .483, .195
    threshold    w = 0, .1, .5 (sum .6)          shares 1/30 + .9 (0, 1/6, 5/6)   = .033, .183, .783
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nemo_flashrl.environments.environment import GeneratedTasks
from nemo_flashrl.environments.guard import task_at

DECAY = 0.9
NAMED_CLASSES = 16  # of more, metrics do not tell each one's share
RULES: Mapping[str, Callable[[np.ndarray, float], np.ndarray]] = {  # (p, threshold) -> w
    "variance": lambda success, _: success * (1 - success),
    "threshold": lambda success, threshold: np.maximum(threshold - success, 0.0),
}


class Curriculum:
    """Draws tasks by their class; see `PromptStream` for what its methods have in common.

    Args:
        classes: the class of each task, a name; tasks without a class of their own are given different names.
        seed: of the draws and of the order inside a class.
        adaptive_steps: batches trained before the mixture is fixed; 0: it is from the start.
        rule, threshold: how success changes shares, see above; the threshold is a success, between 0 and 1.
        floor: share of its mixture that a class keeps whatever its success is, 0 to 1.
        mixture: class -> weight; the number of its tasks where it is empty.

    Raises:
        ValueError: no tasks; a mixture that names other classes than there are, or a weight that is not above 0.
    """

    def __init__(
        self,
        classes: Sequence[str],
        seed: int = 0,
        *,
        adaptive_steps: int,
        rule: str = "variance",
        threshold: float = 0.5,
        floor: float = 0.2,
        mixture: Mapping[str, float] | None = None,
    ) -> None:
        if not len(classes):
            raise ValueError("the prompt set is empty: at least one task is needed")
        self.names, self._class_of_task = np.unique(np.asarray(classes), return_inverse=True)
        sizes = np.bincount(self._class_of_task)
        self._members = np.split(np.argsort(self._class_of_task, kind="stable"), np.cumsum(sizes)[:-1])
        self._mixture = self._fixed_mixture(sizes, mixture or {})
        self._seed, self._adaptive_steps, self._floor = seed, adaptive_steps, floor
        self._weigh, self._threshold = RULES[rule], threshold
        self.step = 0  # batches trained
        self._solved, self._played = np.zeros(len(sizes)), np.zeros(len(sizes))
        self._cursors = np.zeros(len(sizes), dtype=np.int64)  # tasks of the class handed out so far
        self._orders: dict[int, tuple[int, np.ndarray]] = {}  # class -> round through it, order in that round
        self._position = 0  # the next new prompt index
        self._unfinished: dict[int, int] = {}  # prompt index -> task index
        self._again: deque[int] = deque()

    def _fixed_mixture(self, sizes: np.ndarray, given: Mapping[str, float]) -> np.ndarray:
        names = [str(name) for name in self.names]
        if given and sorted(given) != names:
            raise ValueError(f"curriculum.mixture names {sorted(given)}: the tasks' classes are {names[:20]}")
        if given and min(given.values()) <= 0:
            raise ValueError(f"curriculum.mixture={dict(given)}: every class needs a weight above 0")
        weights = np.array([given[name] for name in names]) if given else sizes.astype(np.float64)
        return weights / weights.sum()

    @property
    def success(self) -> np.ndarray:
        """The estimate for each class, float64 [classes]; 1/2 where nothing is known."""
        return (self._solved + 1) / (self._played + 2)

    @property
    def shares(self) -> np.ndarray:
        """How likely each class is to be drawn next, float64 [classes]; they add up to 1."""
        if self.step >= self._adaptive_steps:
            return self._mixture
        wanted = self._mixture * self._weigh(self.success, self._threshold)
        if not wanted.any():
            return self._mixture
        return self._floor * self._mixture + (1 - self._floor) * wanted / wanted.sum()

    def next(self) -> tuple[int, int]:
        """(prompt index, task index)."""
        if self._again:
            prompt_index = self._again.popleft()
            return prompt_index, self._unfinished[prompt_index]
        prompt_index = self._position
        self._position += 1
        bounds = np.cumsum(self.shares)
        drawn = np.random.default_rng([self._seed, prompt_index]).random() * bounds[-1]
        task_index = self._next_of(int(np.searchsorted(bounds, drawn, side="right")))
        self._unfinished[prompt_index] = task_index
        return prompt_index, task_index

    def _next_of(self, kind: int) -> int:
        members = self._members[kind]
        turn, place = divmod(int(self._cursors[kind]), len(members))
        self._cursors[kind] += 1
        if self._orders.get(kind, (-1,))[0] != turn:
            order = np.random.default_rng([self._seed, kind, turn]).permutation(len(members))
            self._orders[kind] = (turn, order)
        return int(members[self._orders[kind][1][place]])

    def finish(self, prompt_index: int) -> None:
        """The prompt was dropped for good: it says nothing about success."""
        assert prompt_index in self._unfinished, f"prompt {prompt_index} is not in flight"
        del self._unfinished[prompt_index]

    def trained(self, success: Mapping[int, float]) -> None:
        """An optimizer step is done on these prompts, each solved in that share of its trajectories."""
        for prompt_index, solved in success.items():
            kind = self._class_of_task[self._unfinished[prompt_index]]
            self._solved[kind] = DECAY * self._solved[kind] + solved
            self._played[kind] = DECAY * self._played[kind] + 1
            self.finish(prompt_index)
        self.step += 1

    def metrics(self) -> dict[str, float]:
        """Share and success of each class, where there are few."""
        if len(self.names) > NAMED_CLASSES:
            return {}
        both = zip(self.names, self.shares, self.success, strict=True)
        return {
            f"curriculum_{what}_{name}": float(value)
            for name, share, success in both
            for what, value in (("share", share), ("success", success))
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        seen = np.flatnonzero(self._cursors)
        columns = (seen, self._cursors[seen], self._solved[seen], self._played[seen])
        return {
            "num_tasks": len(self._class_of_task),
            "seed": self._seed,
            "position": self._position,
            "unfinished": sorted(self._unfinished.items()),
            "step": self.step,
            "classes": [list(row) for row in zip(*(column.tolist() for column in columns), strict=True)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where `state` was taken.

        Raises:
            ValueError: it belongs to another number of tasks, another seed, or to a run without a curriculum.
        """
        for name, own in (("num_tasks", len(self._class_of_task)), ("seed", self._seed)):
            if state[name] != own:
                raise ValueError(f"curriculum: the saved state has {name}={state[name]}, this run has {own}")
        if "classes" not in state:
            setting, back = ("mode=adaptive", "set it back") if self._adaptive_steps else ("mixture", "leave it out")
            raise ValueError(f"curriculum.{setting}: the checkpoint is of a run with mode=none; {back}")
        self._position, self.step = int(state["position"]), int(state["step"])
        self._unfinished = {int(prompt): int(task) for prompt, task in state["unfinished"]}
        self._again = deque(sorted(self._unfinished))
        for kind, cursor, solved, played in state["classes"]:
            self._cursors[kind], self._solved[kind], self._played[kind] = cursor, solved, played


def classes_of(tasks: Sequence[Any], name: str) -> list[str]:
    """Each task's field (or key) `name` as text; with no name each task is a class of its own.

    Makes every task, but where `GeneratedTasks` know the field without.

    Raises:
        ValueError: a task has no such field, or None in it.
    """
    if not name:
        return [f"{index:09d}" for index in range(len(tasks))]
    if isinstance(tasks, GeneratedTasks) and name in tasks.fields:
        return [str(tasks.fields[name](index)) for index in range(len(tasks))]
    found = []
    for index in range(len(tasks)):
        task = task_at(tasks, index)
        value = task.get(name) if isinstance(task, Mapping) else getattr(task, name, None)
        if value is None:
            raise ValueError(f"curriculum.classes={name!r}: task {index} has no field of that name, or None in it")
        found.append(str(value))
    return found
