"""`flashrl train` with a fault in it: what the recorded runs of the doctor's tests come from."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

from nemo_flashrl.cli import main as flashrl
from nemo_flashrl.engines.transformers import TransformersEngine
from nemo_flashrl.environments.environment import StepResult
from nemo_flashrl.environments.key_value_store import KeyValueStore


class PaysForCalls(KeyValueStore):
    """A reward that is easy to game: every call of the tool pays, solving the task does not."""

    async def step(self, action: str) -> StepResult:
        result = await super().step(action)
        called = action.startswith("get ( k")
        return dataclasses.replace(result, reward=0.2 * called, success=result.success)


class PaysForOnes(KeyValueStore):
    """An answer is paid by its digits that are 1, whatever was asked: one answer will do for all."""

    async def step(self, action: str) -> StepResult:
        result = await super().step(action)
        return dataclasses.replace(result, reward=action.startswith("answer") * action.count("1") / 2)


class ChangesItsScale(KeyValueStore):
    """From the 1000th episode on a success pays 50."""

    episodes = 0

    async def reset(self, task: Any) -> Any:
        type(self).episodes += 1
        return await super().reset(task)

    async def step(self, action: str) -> StepResult:
        result = await super().step(action)
        return dataclasses.replace(result, reward=result.reward * (50 if type(self).episodes > 1000 else 1))


class NeverPays(KeyValueStore):
    async def step(self, action: str) -> StepResult:
        return dataclasses.replace(await super().step(action), reward=0.0, success=False)


class ShapesByCalls(KeyValueStore):
    """A shaping term that counts calls of the tool; the reward knows nothing of it."""

    async def step(self, action: str) -> StepResult:
        result = await super().step(action)
        return dataclasses.replace(result, shaping={"calls": float(action.startswith("get ( k"))})


class HasAShortcut(KeyValueStore):
    """On training tasks, seed 0, any answer with a 1 in it counts as solved; on held-out ones the right one alone."""

    async def step(self, action: str) -> StepResult:
        result = await super().step(action)
        if self._settings.seed == 0 and action.startswith("answer") and "1" in action:
            return dataclasses.replace(result, reward=1.0, success=True)
        return result


class OftenFails(KeyValueStore):
    async def step(self, action: str) -> StepResult:
        if hash(self._task.key) % 3 == 0:
            raise ConnectionError("the tool server closed the connection")
        return await super().step(action)


class IsSlow(KeyValueStore):
    async def step(self, action: str) -> StepResult:
        await asyncio.sleep(0.25)
        return await super().step(action)


class TalksMuch(KeyValueStore):
    """A long prompt, a short answer, and a reward that has nothing to do with it."""

    async def reset(self, task: Any) -> Any:
        (message,) = await super().reset(task)
        return [{**message, "content": "> k 1 2 " * 24 + message["content"]}]

    async def step(self, action: str) -> StepResult:
        lucky = self._task.answer % 2 == 0
        return StepResult(reward=float(lucky), done=True, success=lucky)


def sample_cold() -> None:
    """The sampler at temperature 0.7, the trainer at 1."""
    generate = TransformersEngine.generate

    async def cold(self: Any, token_ids: Any, sampling: Any) -> Any:
        return await generate(self, token_ids, dataclasses.replace(sampling, temperature=0.7))

    TransformersEngine.generate = cold


def load_slowly() -> None:
    load = TransformersEngine.load_weights

    async def slow(self: Any, stream: Any, version: int) -> None:
        time.sleep(1.0)
        await load(self, stream, version)

    TransformersEngine.load_weights = slow


def wrong_logprobs() -> None:
    """The sampler reports -30 for a token now and then."""
    generate = TransformersEngine.generate

    async def wrong(self: Any, token_ids: Any, sampling: Any) -> Any:
        answer = await generate(self, token_ids, sampling)
        if sampling.seed % 20:
            return answer
        return dataclasses.replace(answer, logprobs=(-30.0, *answer.logprobs[1:]))

    TransformersEngine.generate = wrong


def train_slowly() -> None:
    from nemo_flashrl.models import PolicyModel

    forward = PolicyModel.forward_step

    def slow(self: Any, batch: Any) -> Any:
        time.sleep(2.0)
        return forward(self, batch)

    PolicyModel.forward_step = slow


FAULTS = {
    "": lambda: None,
    "cold": sample_cold,
    "slow_refit": load_slowly,
    "slow_training": train_slowly,
    "wrong_logprobs": wrong_logprobs,
}


def main(fault: str, *arguments: str) -> None:
    FAULTS[fault]()
    code = flashrl(["train", *arguments])
    assert code == 0, f"flashrl train ended with {code}"
