"""Plays episodes in this process: what every episode of a run shares."""

from __future__ import annotations

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
