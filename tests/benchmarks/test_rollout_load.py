"""What is measured of rollouts' cost: whole episodes over a server that answers as vLLM does."""

from __future__ import annotations

import asyncio
import copy
import json

import numpy as np
import pytest
import rollout_load
from doubles import text_tokenizer

from nemo_flashrl.engines.vllm import VLLMDialect

TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def test_episodes_have_the_turns_and_tokens_that_they_are_said_to_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_load, "TURNS", 4)
    monkeypatch.setattr(rollout_load, "TOKENS", 1600)

    tokenizer = copy.deepcopy(text_tokenizer())
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    tokenizer.chat_template = TEMPLATE

    async def story() -> None:
        async with rollout_load.serving(tokenizer) as url:
            load = rollout_load.Load(url, tokenizer)
            times: list[float] = []
            assert abs(await load.episode(4, 1600, 0, times) - 1600) < 100
            assert len(times) == 4 and times == sorted(times)
            seconds, _ = await load.turns(1, at_once=2)
            assert len(seconds) == 1 and 0 < seconds[0] < 1
            (second,) = await load.answer(1)
            assert 0 < second < 10
            await load.engine.close()

    asyncio.run(story())


def test_an_answer_is_of_the_form_that_the_engine_reads() -> None:
    answer = rollout_load.answer([5, 6, 7], np.random.default_rng(0))
    generation = VLLMDialect().read(answer, 0)
    rows = json.loads(answer)["choices"][0]["logprobs"]["content"]
    assert (generation.token_ids, generation.versions) == ((5, 6, 7), (0, 0, 0))
    assert generation.logprobs == tuple(row["logprob"] for row in rows)
