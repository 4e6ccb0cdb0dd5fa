"""An environment for rollout workers: each task says what its second step does to the process that plays it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_flashrl.environments.environment import Message, StepResult

held: list[bytearray] = []  # what a leak has leaked


@dataclass(frozen=True, slots=True)
class Settings:
    """`folder` is where an episode notes that it has begun; `deeds` are what the tasks do, one each."""

    folder: str
    deeds: list[str]


class Unruly:
    """Three steps; the reward is made of what the policy said."""

    Settings = Settings

    def __init__(self, settings: Settings) -> None:
        self._folder, self._steps, self._reward = Path(settings.folder), 0, 0.0

    @staticmethod
    def tasks(settings: Settings) -> Sequence[Mapping[str, Any]]:
        return [{"number": number, "deed": deed} for number, deed in enumerate(settings.deeds)]

    async def reset(self, task: Mapping[str, Any]) -> list[Message]:
        self._task = task
        with open(self._folder / f"begun-{task['number']}", "a", encoding="ascii") as note:
            note.write(f"{os.getpid()}\n")
        return [{"role": "user", "content": "Q k 2 9 :"}]

    async def step(self, action: str) -> StepResult:
        self._steps += 1
        if self._steps == 2:
            self._do(self._task["deed"])
        done = self._steps == 3
        return StepResult("> k 4 0", reward=float(len(action) % 7) if done else 0.0, done=done, info={"said": action})

    def _do(self, deed: str) -> None:
        first = len((self._folder / f"begun-{self._task['number']}").read_text().splitlines()) == 1
        if deed == "sleep":
            time.sleep(3600)
        elif deed == "hold the GIL":
            re.match("(a*)*b", "a" * 60)
        elif deed == "exit" or (deed == "exit once" and first):
            os.kill(os.getpid(), signal.SIGKILL)
        elif deed == "leak":
            held.append(bytearray(os.urandom(1 << 20) * 300))

    async def close(self) -> None:
        """Nothing is held."""
