"""Conversations of an episode, and the same ones as transformers renders and encodes them."""

from __future__ import annotations

import asyncio
from typing import Any

from doubles import ScriptedEngine, ScriptedEnvironment

from nemo_flashrl.environments.environment import StepResult
from nemo_flashrl.records import Sampling, Trajectory
from nemo_flashrl.rollout.chat_tokens import Codec
from nemo_flashrl.rollout.episode import Limits, run_episode


def rendered(tokenizer: Any, *contents: str, role: str = "user") -> list[int]:
    """transformers' ids of a question, then answers and what follows them in turn, up to the next answer."""
    roles = ["user", *(("assistant", role) * len(contents))]
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)


def play(tokenizer: Any, action: list[int], stops: tuple[int, ...], *answers: StepResult) -> tuple[Trajectory, list]:
    """The trajectory, and the ids that the policy was asked to continue."""

    class Engine(ScriptedEngine):
        async def generate(self, token_ids: Any, sampling: Sampling) -> Any:
            self.actions = [tuple(action)]
            return await super().generate(token_ids, sampling)

    engine = Engine()
    environment = ScriptedEnvironment([*answers, StepResult(done=True)], prompt="What is it?")
    sampling = Sampling(max_tokens=40, stop_token_ids=stops)
    limits = Limits(max_context=900, step_timeout=5.0)
    t = asyncio.run(run_episode(engine, environment, None, Codec(tokenizer), limits, sampling))
    return t, [list(request) for request, _ in engine.requests]


def sampled(tokenizer: Any, answer: str) -> list[int]:
    """The ids of an answer where transformers renders it, without what ends it."""
    prompt = rendered(tokenizer, "What is it?")
    messages = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": answer}]
    whole = tokenizer.apply_chat_template(messages)[len(prompt) :]
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}.union(
        tokenizer.all_special_ids
    )
    return whole[: next(n for n, i in enumerate(whole) if i in special)]
