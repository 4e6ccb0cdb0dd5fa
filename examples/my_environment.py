"""An environment of your own is one file: this one asks for a hidden number, and says "higher" or "lower".

    flashrl train my_run.yaml environment.name=my_environment.GuessTheNumber environment.settings.largest=50

with this folder on PYTHONPATH. The class makes the tasks; an instance plays one of them, turn by turn. Everything that
`step` returns as observation is shown to the policy and never trained on; rewards of all steps are summed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from nemo_flashrl.environments import Message, StepResult


@dataclass(frozen=True)
class Settings:
    """What a user may set; a misspelt or unknown key is refused at start."""

    largest: int = 100
    num_tasks: int = 1000


class GuessTheNumber:
    """One episode."""

    Settings = Settings

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.hidden = 0

    @classmethod
    def tasks(cls, settings: Settings) -> Sequence[int]:
        """Anything with a length and an index; an element is handed to `reset`."""
        return [1 + (index * 7919) % settings.largest for index in range(settings.num_tasks)]

    async def reset(self, task: int) -> list[Message]:
        """Begin: the messages are the prompt, through the tokenizer's chat template if it has one."""
        self.hidden = task
        return [{"role": "user", "content": f"I think of a number from 1 to {self.settings.largest}. Guess it."}]

    async def step(self, action: str) -> StepResult:
        """Answer one action. What raises here, or takes too long, ends this episode and never the run."""
        match = re.search(r"\d+", action)
        if match is None:
            return StepResult(observation="Say a number.")
        if int(match[0]) == self.hidden:
            return StepResult(reward=1.0, done=True, success=True)
        return StepResult(observation="higher" if int(match[0]) < self.hidden else "lower")

    async def close(self) -> None:
        """Free what the episode held."""
