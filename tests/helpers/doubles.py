"""Stand-ins for the rollout tests: an engine that says what it is told to, environments that misbehave, a collector."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nemo_flashrl.engines import Engine
from nemo_flashrl.environments.environment import Environment, Message, StepResult
from nemo_flashrl.records import Batch, Generation, Sampling
from nemo_flashrl.rehearsal.warm_start import make_tokenizer
from nemo_flashrl.rollout.collector import Collector
from nemo_flashrl.rollout.episode import Limits
from nemo_flashrl.rollout.player import Player
from nemo_flashrl.rollout.prompts import PromptStream

TOKENIZER = make_tokenizer()
STOP = TOKENIZER.convert_tokens_to_ids(")")
SAMPLING = Sampling(max_tokens=8, stop_token_ids=(STOP,))
DONE = StepResult(reward=1.0, done=True, success=True)


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False).input_ids


GET = ids("get ( k 2 9 )")


class ScriptedEngine:
    """Answers the n-th turn of every episode with the n-th action; keeps what it was asked.

    A turn is told by how often the stop token stands in the prompt. Log-probs are -1/16, -2/16, ... in an answer.
    """

    def __init__(self, *actions: Sequence[int], version: int = 0) -> None:
        self.actions = [tuple(action) for action in actions]
        self.version = version
        self.faults: Counter[str] = Counter()
        self.requests: list[tuple[list[int], Sampling]] = []

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        self.requests.append((list(token_ids), sampling))
        await asyncio.sleep(0)
        action = self.actions[min(list(token_ids).count(STOP), len(self.actions) - 1)][: sampling.max_tokens]
        logprobs = tuple(-(i + 1) / 16 for i in range(len(action)))
        reason = "stop" if action and action[-1] in sampling.stop_token_ids else "length"
        return Generation(action, logprobs, (self.version,) * len(action), reason)

    async def load_weights(self, stream: Any, version: int) -> None:
        self.version = version

    async def close(self) -> None:
        pass


@dataclass
class ScriptedEnvironment:
    """Answers with `results`, one a step; an exception among them is raised, a number of seconds is slept first."""

    results: list[Any]
    prompt: str | list[Message] = "Q k 2 9 :"
    log: list[str] = field(default_factory=list)
    on_close: Callable[[], None] = lambda: None

    async def reset(self, task: Any) -> list[Message]:
        self.log.append("reset")
        if isinstance(self.prompt, Exception):
            raise self.prompt
        return [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt

    async def step(self, action: str) -> StepResult:
        self.log.append(action)
        result = self.results.pop(0)
        if isinstance(result, int | float):
            await asyncio.sleep(result)
            result = self.results.pop(0)
        if isinstance(result, BaseException):
            raise result
        return result

    async def close(self) -> None:
        self.log.append("close")
        self.on_close()


@functools.cache
def text_tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte: every text comes back as it was."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


class TextEngine(ScriptedEngine):
    """Says the given texts one after another, in one episode; or what `choose` makes of the text so far."""

    def __init__(self, *texts: str, choose: Callable[[str], str] | None = None) -> None:
        super().__init__()
        self.texts, self.choose = list(texts), choose

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        tokenizer = text_tokenizer()
        text = self.choose(tokenizer.decode(list(token_ids))) if self.choose else self.texts.pop(0)
        self.actions = [tuple(tokenizer(text).input_ids)]
        return await super().generate(token_ids, sampling)


class TornTasks(list):
    """Tasks of which number 9 cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index == 9:
            raise OSError("page 9 is torn")
        return super().__getitem__(index)


def collector(
    engine: Engine,
    make_environment: Callable[[], Environment] = lambda: ScriptedEnvironment([DONE]),
    prompts: PromptStream | None = None,
    tasks: Any = range(1000),
    **settings: Any,
) -> Collector:
    limits = Limits(max_context=128, step_timeout=20.0)
    prompts = prompts or PromptStream(len(tasks))
    return Collector(engine, make_environment, tasks, TOKENIZER, prompts, limits, SAMPLING, **settings)


def numbers(batch: Batch) -> list[int]:
    return [t.prompt_index for t in batch.trajectories]


def player(source: Collector) -> Player:
    """What plays the episodes of a collector, in this process."""
    return source._play.__self__
