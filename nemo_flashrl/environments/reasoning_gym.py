"""The tasks of reasoning-gym (PyPI `reasoning-gym`): over a hundred generators of questions that can be checked.

One episode: a question, the policy's answer in <answer> tags, and the generator's own score from 0 to 1.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_flashrl.environments.answers import MAX_ANSWER, score
from nemo_flashrl.environments.environment import GeneratedTasks, Message, StepResult

try:
    import reasoning_gym
except ModuleNotFoundError as error:
    raise ImportError(f"{error}: pip install 'nemo_flashrl[reasoning-gym]'") from error


@dataclass(frozen=True)
class Settings:
    """Which generators; `(seed, i)` fixes question i."""

    dataset: str = "chain_sum"  # a name of reasoning_gym.factory.DATASETS
    options: dict[str, Any] = field(default_factory=dict)  # options of that generator, such as min_terms
    datasets: dict[str, Any] = field(default_factory=dict)  # several in place of `dataset`: name -> its options
    num_tasks: int = 10_000  # of all generators together, one after the other in turn
    seed: int = 0
    instruction: str = "Think step by step, then give the final answer alone in <answer> </answer> tags."
    solved_at: float = 1.0  # the score from which a task counts as solved


@dataclass(frozen=True, slots=True)
class Task:
    """A question and what it takes to score an answer to it elsewhere."""

    question: str
    index: int
    source: tuple[str, str, int, int]  # dataset, options as JSON, size, seed

    @property
    def dataset(self) -> str:
        """The generator's name, the task's class."""
        return self.source[0]


@functools.cache
def _dataset(name: str, options: str, size: int, seed: int) -> Any:
    return reasoning_gym.create_dataset(name, size=size, seed=seed, **json.loads(options))


def score_answer(source: tuple[str, str, int, int], index: int, answer: str) -> float:
    """The generator's score of an answer; runs in a worker process."""
    dataset = _dataset(*source)
    return dataset.score_answer(answer, dataset[index])


def _last_answer(text: str) -> str | None:
    """What stands in the last <answer> tags, as reasoning_gym.utils.extract_answer finds it, in linear time."""
    end = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, max(end, 0))
    return text[begin + len("<answer>") : end].strip() if begin >= 0 else None


def make_tasks(settings: Settings) -> Sequence[Task]:
    """All questions of `settings`, each made when it is asked for.

    Raises:
        ValueError: no such generator, options that it does not take, or fewer tasks than generators.
    """
    chosen = settings.datasets or {settings.dataset: settings.options}
    if settings.datasets and settings.options:
        raise ValueError(
            f"environment.settings.options={settings.options}: options of one generator beside datasets="
            f"{settings.datasets}; give each its own there, datasets.{next(iter(settings.datasets))}={{...}}"
        )
    if settings.num_tasks < len(chosen):
        raise ValueError(f"environment.settings.num_tasks={settings.num_tasks}: fewer than the {len(chosen)} datasets")
    sources = [
        (name, json.dumps(options or {}), -(-(settings.num_tasks - turn) // len(chosen)), settings.seed)
        for turn, (name, options) in enumerate(chosen.items())
    ]
    for source in sources:
        given = settings.datasets.get(source[0])
        if not (given is None or isinstance(given, dict)):
            raise ValueError(f"environment.settings.datasets, {source[0]!r}: its options are {given}, not a mapping")
        try:
            _dataset(*source)
        except (ValueError, TypeError, AssertionError) as error:
            raise ValueError(f"environment.settings of reasoning_gym, {source[0]!r}: {error}") from error

    def make(index: int) -> Task:
        place, source = index // len(sources), sources[index % len(sources)]
        return Task(_dataset(*source)[place]["question"], place, source)

    return GeneratedTasks(settings.num_tasks, make, {"dataset": lambda index: sources[index % len(sources)][0]})


class ReasoningGym:
    """One question."""

    Settings = Settings

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._task: Task | None = None

    @classmethod
    def tasks(cls, settings: Settings) -> Sequence[Task]:
        return make_tasks(settings)

    async def reset(self, task: Task) -> list[Message]:
        self._task = task
        return [{"role": "user", "content": f"{task.question}\n\n{self._settings.instruction}"}]

    async def step(self, action: str) -> StepResult:
        answer, reward = _last_answer(action), 0.0
        if answer is not None and len(answer) <= MAX_ANSWER:
            reward = await score(score_answer, self._task.source, self._task.index, answer)
        solved = reward >= self._settings.solved_at
        outcome = "no_answer" if answer is None else "right" if solved else "wrong"
        info = {"outcome": outcome, "dataset": self._task.source[0]}
        return StepResult(reward=reward, done=True, success=solved, info=info)

    async def close(self) -> None:
        self._task = None
