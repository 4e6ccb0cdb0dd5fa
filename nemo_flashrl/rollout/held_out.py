"""Success of a policy on tasks that training never asks for."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from nemo_flashrl.engines.base import Engine
from nemo_flashrl.environments.environment import Environment
from nemo_flashrl.records import Sampling, Trajectory
from nemo_flashrl.rollout.chat_tokens import Codec
from nemo_flashrl.rollout.curriculum import NAMED_CLASSES
from nemo_flashrl.rollout.episode import Limits
from nemo_flashrl.rollout.player import Play, Player


async def evaluate(
    engine: Engine,
    make_environment: Callable[[], Environment],
    tasks: Sequence[Any],
    tokenizer: Any,
    limits: Limits,
    sampling: Sampling,
    *,
    max_in_flight: int,
    samples: int = 1,
    seed: int = 0,
) -> list[Trajectory]:
    """`samples` episodes of each task, at most `max_in_flight` at a time; in the order of `tasks`, a task's together.

    A task whose prompt leaves no room for an answer is one that was not solved.
    """
    player = Player(engine, make_environment, tasks, Codec(tokenizer), limits, seed=seed)
    return await play_all(player.play, len(tasks), sampling, max_in_flight=max_in_flight, samples=samples)


async def play_all(
    play: Play, tasks: int, sampling: Sampling, *, max_in_flight: int, samples: int = 1
) -> list[Trajectory]:
    """As `evaluate`, of the first `tasks` that `play` knows."""
    slots = asyncio.Semaphore(max_in_flight)

    async def one(index: int, sample: int) -> Trajectory:
        async with slots:
            return await play(index, index, sample, sampling)

    return list(await asyncio.gather(*(one(index, sample) for index in range(tasks) for sample in range(samples))))


def environment_errors(trajectories: Sequence[Trajectory]) -> int:
    """Number of episodes that a fault of the environment ended."""
    return sum(t.end_reason == "environment_error" for t in trajectories)


def success_rate(trajectories: Sequence[Trajectory]) -> float:
    """Share of episodes that the environment calls solved."""
    return sum(not t.failed for t in trajectories) / len(trajectories)


def success_by_class(trajectories: Sequence[Trajectory], classes: Sequence[str]) -> dict[str, float]:
    """`success_rate` of each class's episodes; `classes` are those of the tasks that `prompt_index` counts.

    Empty without classes, or with more of them than metrics name.
    """
    if not 0 < len(set(classes)) <= NAMED_CLASSES:
        return {}
    played: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        played.setdefault(classes[trajectory.prompt_index], []).append(trajectory)
    return {name: success_rate(played[name]) for name in sorted(played)}


def pass_at_k(trajectories: Sequence[Trajectory], k: int) -> float:
    """How likely one of k samples of a task solves it, mean over tasks.

    Raises:
        ValueError: a task has fewer than k samples.
    """
    counts = Counter(t.prompt_index for t in trajectories)
    solved = Counter(t.prompt_index for t in trajectories if not t.failed)
    return unbiased_pass_at_k([(n, solved[task]) for task, n in counts.items()], k)


def unbiased_pass_at_k(tasks: Sequence[tuple[int, int]], k: int) -> float:
    """Mean over tasks of 1 - C(n - c, k) / C(n, k), from (n samples, c of them solved) of each.

    Unbiased (Chen et al. 2021), where 1 - (1 - c / n)^k is not; with k = 1 it is the mean success of a task.

    >>> unbiased_pass_at_k([(4, 1), (4, 3)], 2)  # 1 - 3/6 and 1 - 0
    0.75

    Raises:
        ValueError: a task has fewer than k samples.
    """
    fewest = min((n for n, _ in tasks), default=0)
    if not 1 <= k <= fewest:
        raise ValueError(f"k={k}: must be from 1 to the {fewest} samples of a task")
    missed = [math.comb(n - c, k) / math.comb(n, k) for n, c in tasks]
    return 1 - sum(missed) / len(missed)
