"""The embedded engine against a plain forward pass of transformers: log-probs, sampling, weights, faults."""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from doubles import STOP, TOKENIZER, ids
from tiny import write_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from nemo_flashrl.engines import Engine, TransformersEngine
from nemo_flashrl.environments.key_value_store import KeyValueStore, Settings
from nemo_flashrl.records import Generation, Sampling
from nemo_flashrl.rehearsal.warm_start import make_warm_start
from nemo_flashrl.rollout.episode import Limits
from nemo_flashrl.rollout.player import evaluate

ACTION = Sampling(max_tokens=8, stop_token_ids=(STOP,))
PROMPTS = [ids("Q k 2 9 :"), ids("Q k 2 9 : get ( k 2 9 ) > k 4 0"), ids("Q"), ids("Q k 0 1 : get ( k 0 1 ) > v 5 5")]


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> PreTrainedModel:
    """Other weights of the same shapes."""
    folder = make_warm_start(tmp_path_factory.mktemp("engine") / "other", seed=7, steps=5)
    return AutoModelForCausalLM.from_pretrained(folder)


def generate(engine: Engine, prompts: Sequence[list[int]], *samplings: Sampling) -> list[Generation]:
    async def all_at_once() -> list[Generation]:
        return await asyncio.gather(*[engine.generate(p, s) for p, s in zip(prompts, samplings, strict=True)])

    return asyncio.run(all_at_once())


def sampled_logprobs(model: PreTrainedModel, prompt: list[int], answer: Generation, temperature=1.0) -> list[float]:
    """Of `answer`'s tokens, by one forward pass over everything."""
    tokens = torch.tensor([[*prompt, *answer.token_ids]])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(tokens).logits[0] / temperature, -1)
    return [logprobs[len(prompt) - 1 + i, token].item() for i, token in enumerate(answer.token_ids)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_of_whole_episodes_are_the_models(warm_start: Path, temperature: float) -> None:
    settings = Settings(num_tasks=48)
    trajectories = asyncio.run(
        evaluate(
            TransformersEngine(warm_start),
            lambda: KeyValueStore(settings),
            KeyValueStore.tasks(settings),
            TOKENIZER,
            Limits(max_context=128),
            replace(ACTION, temperature=temperature),
            max_in_flight=48,
        )
    )
    assert max(t.turns for t in trajectories) >= 4
    model = AutoModelForCausalLM.from_pretrained(warm_start)
    raw_difference = 0.0
    for t in trajectories:
        tokens = torch.from_numpy(t.token_ids)
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1]
        mask = torch.from_numpy(t.action_mask)[1:]
        behavior = torch.from_numpy(t.behavior_logprobs)[1:]
        tempered, raw = (
            torch.log_softmax(x, -1).gather(-1, tokens[1:, None])[:, 0] for x in (logits / temperature, logits)
        )
        torch.testing.assert_close(behavior[mask], tempered[mask], rtol=0, atol=1e-5)
        assert torch.equal(behavior[~mask], torch.zeros(len(behavior) - int(mask.sum())))
        raw_difference = max(raw_difference, (behavior - raw)[mask].abs().max().item())
    # The wrong answer, log-probs before temperature, would be far off.
    assert raw_difference > 0.5 if temperature != 1 else raw_difference < 1e-5


def test_tokens_are_drawn_from_the_model(warm_start: Path) -> None:
    """6000 first tokens after an observation: every frequency within 4 standard deviations of its probability."""
    engine, model = TransformersEngine(warm_start), AutoModelForCausalLM.from_pretrained(warm_start)
    prompt = PROMPTS[1]
    for temperature in (1.0, 2.5):
        samplings = [Sampling(temperature, max_tokens=1, seed=seed) for seed in range(6000)]
        answers = generate(engine, [prompt] * 6000, *samplings)
        counts = Counter(answer.token_ids[0] for answer in answers)
        with torch.no_grad():
            expected = torch.softmax(model(torch.tensor([prompt])).logits[0, -1] / temperature, -1)
        for token, probability in enumerate(expected.tolist()):
            spread = math.sqrt(probability * (1 - probability) / 6000)
            assert abs(counts[token] / 6000 - probability) < 4 * spread + 2e-4, TOKENIZER.decode([token])


def test_a_request_does_not_feel_its_neighbours(warm_start: Path) -> None:
    engine = TransformersEngine(warm_start)
    samplings = [replace(ACTION, seed=seed, temperature=0.5 + seed / 4, max_tokens=4 + seed) for seed in range(4)]
    together = generate(engine, PROMPTS, *samplings)
    again = generate(engine, PROMPTS[::-1], *samplings[::-1])[::-1]
    for prompt, sampling, answer, reordered in zip(PROMPTS, samplings, together, again, strict=True):
        (alone,) = generate(engine, [prompt], sampling)
        assert answer.token_ids == alone.token_ids == reordered.token_ids
        assert answer.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
    assert generate(engine, PROMPTS, *samplings) == together  # and the same wave is the same to the bit
    seeds = {generate(engine, [PROMPTS[0]], replace(ACTION, seed=seed))[0].token_ids for seed in range(20)}
    assert len(seeds) > 3


def test_requests_made_together_share_one_wave(warm_start: Path, monkeypatch) -> None:
    """Six requests, two of which come a few rounds late, as from a slower tool: one prefill for all of them."""
    engine = TransformersEngine(warm_start)
    shapes = []
    forward = engine._model.forward
    monkeypatch.setattr(
        engine._model, "forward", lambda **kw: shapes.append(tuple(kw["input_ids"].shape)) or forward(**kw)
    )

    async def late(rounds: int) -> Generation:
        for _ in range(rounds):
            await asyncio.sleep(0)
        return await engine.generate(PROMPTS[0], Sampling(max_tokens=2, seed=rounds))

    async def run() -> None:
        await asyncio.gather(*[late(rounds) for rounds in (0, 0, 0, 0, 3, 6)])

    asyncio.run(run())
    assert shapes == [(6, 5), (6, 1)]


def test_rows_end_on_their_own(warm_start: Path) -> None:
    engine = TransformersEngine(warm_start)
    greedy = replace(ACTION, temperature=0)
    samplings = [greedy, replace(greedy, max_tokens=3), replace(greedy, stop_token_ids=()), greedy]
    answers = generate(engine, [PROMPTS[0]] * 4, *samplings)
    action = tuple(ids("get ( k 2 9 )"))
    assert answers[0].token_ids == answers[3].token_ids == action  # the stop token is there, and has its log-prob
    assert [a.finish_reason for a in answers] == ["stop", "length", "length", "stop"]
    assert answers[1].token_ids == action[:3]
    assert answers[2].token_ids[:6] == action
    assert len(answers[2].token_ids) == 8
    assert [len(a.logprobs) for a in answers] == [6, 3, 8, 6]
    model = AutoModelForCausalLM.from_pretrained(warm_start)
    assert answers[2].logprobs == pytest.approx(sampled_logprobs(model, PROMPTS[0], answers[2]), abs=1e-5)


def test_new_weights_answer_at_once(warm_start: Path, other: PreTrainedModel) -> None:
    """After the load log-probs are those of the new weights; keys and values kept from before would show."""
    engine = TransformersEngine(warm_start, version=4)
    sampling = replace(ACTION, seed=3)
    (before,) = generate(engine, PROMPTS[1:2], sampling)
    asyncio.run(engine.load_weights(other.state_dict().items(), version=5))
    (after,) = generate(engine, PROMPTS[1:2], sampling)
    assert set(before.versions) == {4}
    assert set(after.versions) == {5}
    assert after.logprobs == pytest.approx(sampled_logprobs(other, PROMPTS[1], after), abs=1e-5)
    old = sampled_logprobs(AutoModelForCausalLM.from_pretrained(warm_start), PROMPTS[1], after)
    assert max(abs(a - b) for a, b in zip(after.logprobs, old, strict=True)) > 0.5


def test_a_load_in_the_middle_of_an_answer(warm_start: Path, other: PreTrainedModel) -> None:
    """The first answer is of two versions; each token has the log-prob of the version that it is labelled with.

    Keys and values kept over the load would show, and so would a second request that waited for the first to end.
    """
    engine = TransformersEngine(warm_start)
    models = [AutoModelForCausalLM.from_pretrained(warm_start), other]
    long = Sampling(max_tokens=40, seed=1)

    async def run() -> list[Generation]:
        first = asyncio.create_task(engine.generate(PROMPTS[0], long))
        for _ in range(20):
            await asyncio.sleep(0)
        load = asyncio.create_task(engine.load_weights(other.state_dict().items(), version=1))
        second = asyncio.create_task(engine.generate(PROMPTS[1], long))
        await load
        return [await first, await second]

    answers = asyncio.run(run())
    assert [sorted(set(answer.versions)) for answer in answers] == [[0, 1], [1]]
    assert list(answers[0].versions) == sorted(answers[0].versions)
    assert answers[0].token_ids[:5] == generate(TransformersEngine(warm_start), PROMPTS[:1], long)[0].token_ids[:5]
    for prompt, answer in zip(PROMPTS, answers, strict=False):
        by_version = [sampled_logprobs(model, prompt, answer) for model in models]
        expected = [by_version[version][i] for i, version in enumerate(answer.versions)]
        assert answer.logprobs == pytest.approx(expected, abs=1e-5)


def test_a_broken_load_leaves_the_old_weights(warm_start: Path, other: PreTrainedModel) -> None:
    engine = TransformersEngine(warm_start)
    before = generate(engine, PROMPTS, *[ACTION] * 4)
    good = list(other.state_dict().items())

    def torn():
        yield from good[:-1]
        raise ConnectionError("the trainer is gone")

    name, tensor = good[5]
    broken = {
        f"missing tensor {good[0][0]}": good[1:],
        f"missing tensor {good[3][0]} and 2 more": good[:3] + good[6:],
        "no tensor named model.extra": [*good, ("model.extra", torch.zeros(2))],
        f"duplicate tensor {name}": [*good, (name, tensor)],
        re.escape(f"{name} has shape (3,), the model's is {tuple(tensor.shape)}"): [
            (n, torch.zeros(3) if n == name else t) for n, t in good
        ],
    }
    for message, stream in broken.items():
        with pytest.raises(ValueError, match=message):
            asyncio.run(engine.load_weights(stream, version=1))
    with pytest.raises(ConnectionError):
        asyncio.run(engine.load_weights(torn(), version=1))
    assert engine.version == 0
    assert generate(engine, PROMPTS, *[ACTION] * 4) == before


def test_the_engine_keeps_copies_only(warm_start: Path, other: PreTrainedModel) -> None:
    engine = TransformersEngine(warm_start)
    tensors = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    asyncio.run(engine.load_weights(tensors.items(), version=1))
    before = generate(engine, PROMPTS, *[ACTION] * 4)
    for tensor in tensors.values():
        tensor.fill_(float("nan"))
    assert generate(engine, PROMPTS, *[ACTION] * 4) == before


def test_tied_embeddings_come_once(tmp_path: Path) -> None:
    engine = TransformersEngine(write_model(tmp_path / "a", vocab_size=23, tied=True))
    tied = AutoModelForCausalLM.from_pretrained(write_model(tmp_path / "b", vocab_size=23, tied=True, seed=1))
    stream = dict(tied.named_parameters())
    assert "lm_head.weight" not in stream
    asyncio.run(engine.load_weights(stream.items(), version=1))
    (answer,) = generate(engine, PROMPTS[:1], ACTION)
    assert answer.logprobs == pytest.approx(sampled_logprobs(tied, PROMPTS[0], answer), abs=1e-5)
    with pytest.raises(ValueError, match="tied, but lm_head.weight differs"):
        wrong = {**stream, "lm_head.weight": torch.zeros(23, 64)}
        asyncio.run(engine.load_weights(wrong.items(), version=2))


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], ACTION, "needs at least one token"),
        ([1, 23], ACTION, r"each in 0..22"),
        ([-1], ACTION, r"each in 0..22"),
        ([1] * 121, ACTION, "121 tokens and max_tokens=8 exceed the model's max_position_embeddings=128"),
        ([1], replace(ACTION, temperature=-1.0), "temperature=-1.0"),
        ([1], replace(ACTION, max_tokens=0), "max_tokens=0"),
    ],
)
def test_bad_requests_are_refused_alone(warm_start: Path, prompt: list[int], sampling: Sampling, message: str) -> None:
    engine = TransformersEngine(warm_start)

    async def run() -> list:
        calls = [engine.generate(prompt, sampling), engine.generate(PROMPTS[0], ACTION)]
        return await asyncio.gather(*calls, return_exceptions=True)

    refused, answered = asyncio.run(run())
    with pytest.raises(ValueError, match=message):
        raise refused
    assert answered == generate(engine, PROMPTS[:1], ACTION)[0]


def test_broken_weights_and_closing_end_every_request(warm_start: Path, other: PreTrainedModel) -> None:
    engine = TransformersEngine(warm_start)
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in other.state_dict().items()}
    asyncio.run(engine.load_weights(broken.items(), version=1))
    with pytest.raises(FloatingPointError, match="not finite"):
        generate(engine, PROMPTS, *[ACTION] * 4)
    asyncio.run(engine.load_weights(other.state_dict().items(), version=2))
    assert len(generate(engine, PROMPTS, *[ACTION] * 4)) == 4

    async def close_early() -> list:
        calls = [asyncio.create_task(engine.generate(p, replace(ACTION, stop_token_ids=()))) for p in PROMPTS]
        await asyncio.sleep(0)
        await engine.close()
        return await asyncio.gather(*calls, return_exceptions=True)

    assert all("the engine was closed" in str(error) for error in asyncio.run(close_early()))
    with pytest.raises(RuntimeError, match="closed"):
        generate(engine, PROMPTS[:1], ACTION)
