"""Success of a policy on tasks that training never asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from nemo_flashrl.environments.environment import Environment
from nemo_flashrl.records import Sampling, Trajectory
from nemo_flashrl.rollout.agent import Limits, run_episode
from nemo_flashrl.rollout.codec import Codec
from nemo_flashrl.rollout.engine import Engine


async def evaluate(
    engine: Engine,
    make_environment: Callable[[], Environment],
    tasks: Sequence[Any],
    tokenizer: Any,
    limits: Limits,
    sampling: Sampling,
    *,
    seed: int = 0,
) -> list[Trajectory]:
    """One episode of each task, all at once; in the order of `tasks`."""
    codec = Codec(tokenizer)
    episodes = [
        run_episode(engine, make_environment(), task, codec, limits, sampling, prompt_index=index, seed=seed)
        for index, task in enumerate(tasks)
    ]
    return list(await asyncio.gather(*episodes))


def success_rate(trajectories: Sequence[Trajectory]) -> float:
    """Share of episodes that the environment calls solved."""
    return sum(not t.failed for t in trajectories) / len(trajectories)
