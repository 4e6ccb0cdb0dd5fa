"""An environment for runs against a real server: two turns, and a reward that any policy earns some of."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_flashrl.environments.environment import Message, StepResult


@dataclass
class Settings:
    tasks: int = 64


class Letters:
    """The reward is the share of `k`s among 48 tokens; the second turn begins after a short observation."""

    Settings = Settings

    def __init__(self, settings: Settings) -> None:
        self.turn = 0

    @classmethod
    def tasks(cls, settings: Settings) -> list[str]:
        return [f"Q k {n % 10} {n // 10} :" for n in range(settings.tasks)]

    async def reset(self, task: str) -> list[Message]:
        return [{"role": "user", "content": task}]

    async def step(self, action: str) -> StepResult:
        self.turn += 1
        return StepResult("9 2", reward=action.count("k") / 48, done=self.turn == 2)

    async def close(self) -> None:
        pass
