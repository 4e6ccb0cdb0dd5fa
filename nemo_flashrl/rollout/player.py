"""Plays episodes in this process: those of training one by one, held-out tasks all together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from nemo_flashrl.engines.base import Engine
from nemo_flashrl.environments.environment import Environment
from nemo_flashrl.environments.guard import begun
from nemo_flashrl.records import Sampling, Trajectory
from nemo_flashrl.rollout.chat_tokens import Codec
from nemo_flashrl.rollout.episode import Limits, run_episode

Play = Callable[[int, int, int, Sampling], Awaitable[Trajectory]]  # prompt index, task index, sample -> an episode


class Player:
    """Plays `tasks` with `engine`; `seed` fixes the randomness, `novelty` marks what a trajectory repeats."""

    def __init__(
        self,
        engine: Engine,
        make_environment: Callable[[], Environment],
        tasks: Sequence[Any],
        codec: Codec,
        limits: Limits,
        *,
        seed: int = 0,
        novelty: Callable[[Trajectory], Awaitable[Trajectory]] | None = None,
    ) -> None:
        self._engine, self._make_environment, self._tasks = engine, make_environment, tasks
        self._codec, self._limits, self._seed, self._novelty = codec, limits, seed, novelty

    async def play(self, prompt_index: int, task_index: int, sample: int, sampling: Sampling) -> Trajectory:
        """One episode, `sample` of its prompt. Raises as `run_episode`."""
        task, environment = begun(self._tasks, task_index, self._make_environment)
        trajectory = await run_episode(
            self._engine,
            environment,
            task,
            self._codec,
            self._limits,
            sampling,
            task_index=task_index,
            prompt_index=prompt_index,
            sample=sample,
            seed=self._seed,
        )
        return trajectory if self._novelty is None else await self._novelty(trajectory)


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
