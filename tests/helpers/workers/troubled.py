"""An environment that is in trouble after some episodes, and leaves files that say so."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_flashrl.environments import key_value_store
from nemo_flashrl.environments.environment import Message, StepResult
from nemo_flashrl.environments.key_value_store import KeyValueStore


@dataclass(frozen=True)
class Settings(key_value_store.Settings):
    folder: str = ""  # gets `trouble` when it begins and `closed-N` as episode N is closed
    sound: int = 16  # episodes before; the check at the start of a run plays at being eight
    seconds: float = 1e6  # that a step takes then
    blocks: bool = False  # the event loop, for that time
    long_prompt: bool = False  # the prompt leaves no room in the context then


class Troubled(KeyValueStore):
    Settings = Settings
    episodes = 0

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.settings = settings

    async def reset(self, task: Any) -> list[Message]:
        type(self).episodes += 1
        self.number = self.episodes
        messages = await super().reset(task)
        if self.number > self.settings.sound and self.settings.long_prompt:
            return [{**messages[0], "content": "k " * 500}]
        return messages

    async def step(self, action: str) -> StepResult:
        if self.number > self.settings.sound:
            (Path(self.settings.folder) / "trouble").touch()
            if self.settings.blocks:
                time.sleep(self.settings.seconds)
            await asyncio.sleep(self.settings.seconds)
        return await super().step(action)

    async def close(self) -> None:
        (Path(self.settings.folder) / f"closed-{self.number}").touch()
        await super().close()
