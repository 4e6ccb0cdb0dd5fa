"""A real vLLM server, one for the session: log-probs, versions, new weights under way, runs of `flashrl train`."""

from __future__ import annotations

import asyncio
import functools
import json
import subprocess
import sys
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import HELPERS
from processes import run_ranks
from real_server import CONTEXT, EXACT, VOCAB, RealServer, check_three_syncs
from server_processes import StandIn, ended_after
from transformers import AutoModelForCausalLM, PreTrainedModel

from nemo_flashrl.engines import BroadcastEngine, VLLMEngine
from nemo_flashrl.records import Generation, Sampling
from nemo_flashrl.run.jsonl import read_metrics
from nemo_flashrl.weight_sync.probe import Probe, ProbedWeights, probe_token_ids

LONG = 240.0


@pytest.fixture(scope="module")
def policies(vllm_server: RealServer) -> dict[int, PreTrainedModel]:
    """Three models of one shape; 0 is the server's first."""
    models = {}
    for version in range(3):
        models[version] = AutoModelForCausalLM.from_pretrained(vllm_server.model).eval().requires_grad_(False)
        for parameter in models[version].parameters():
            parameter.add_(
                version * 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(version))
            )
    return models


def logprobs(model: PreTrainedModel, token_ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Of `token_ids[1:]`."""
    scores = torch.log_softmax(model(torch.tensor([token_ids])).logits[0, :-1].float() / temperature, -1)
    return scores.gather(-1, torch.tensor(token_ids[1:])[:, None])[:, 0]


def weights(model: PreTrainedModel, leave_out: str = "-") -> ProbedWeights:
    ids = probe_token_ids(VOCAB)
    named = [(name, tensor) for name, tensor in model.state_dict().items() if leave_out not in name]
    return ProbedWeights(named, Probe(ids, tuple(logprobs(model, list(ids)).tolist()), 1e-3))


def run(server: RealServer, story: Callable[[Any], Awaitable[Any]], kind: Callable[..., Any] = VLLMEngine) -> Any:
    async def whole() -> Any:
        engine = kind([server.url], VOCAB, timeout=LONG)
        try:
            return await asyncio.wait_for(story(engine), LONG)
        finally:
            await engine.close()

    return asyncio.run(whole())


def distance(prompt: list[int], generation: Generation, policies: dict[int, PreTrainedModel], temperature: float = 1.0):
    """Largest difference between the sampler's log-probs and those of the version that each token is said to be of."""
    whole = [*prompt, *generation.token_ids]
    known = torch.stack([logprobs(model, whole, temperature)[len(prompt) - 1 :] for model in policies.values()])
    versions = torch.tensor(generation.versions)
    expected = known.gather(0, versions[None])[0]
    return float((expected - torch.tensor(generation.logprobs)).abs().max())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_the_models(vllm_server: RealServer, policies: dict, temperature: float) -> None:
    """3,072 tokens; and the same seed samples the same tokens, another one others."""

    async def story(engine: VLLMEngine) -> None:
        prompts = [[n, 2 * n + 1, 7] for n in range(24)]
        samplings = [Sampling(temperature=temperature, max_tokens=128, seed=n) for n in range(24)]
        await engine.load_weights(weights(policies[0]), 0)
        answers = await asyncio.gather(*(engine.generate(*pair) for pair in zip(prompts, samplings, strict=True)))
        assert sum(len(a.token_ids) for a in answers) == 3072
        worst = max(distance(p, a, policies, temperature) for p, a in zip(prompts, answers, strict=True))
        assert worst <= EXACT
        other = 0.7 if temperature == 1.0 else 1.0  # the wrong temperature does not pass
        assert distance(prompts[0], answers[0], policies, other) > 0.1
        again = await engine.generate(prompts[3], samplings[3])
        assert again.token_ids == answers[3].token_ids and again.token_ids != answers[4].token_ids

    run(vllm_server, story)


def test_stop_tokens_and_lengths(vllm_server: RealServer, policies: dict) -> None:
    """The stop token is sampled, kept and scored; a prompt beyond the context is refused and harms nobody."""

    async def story(engine: VLLMEngine) -> None:
        await engine.load_weights(weights(policies[0]), 0)
        free = await engine.generate([5, 6], Sampling(max_tokens=40, seed=1))
        stop = free.token_ids[10]
        first = free.token_ids.index(stop)
        stopped = await engine.generate([5, 6], Sampling(max_tokens=40, seed=1, stop_token_ids=(stop,)))
        assert stopped.token_ids == free.token_ids[: first + 1]
        assert (free.finish_reason, stopped.finish_reason) == ("length", "stop")
        assert distance([5, 6], stopped, policies) <= EXACT
        with pytest.raises(ValueError, match="refused the request .400.*maximum model length"):
            await engine.generate([1] * (CONTEXT + 1), Sampling())
        assert not engine.faults

    run(vllm_server, story)


def test_a_context_beyond_the_servers_is_refused_at_start(vllm_server: RealServer) -> None:
    """Else an episode that grows so long would end the run, hours later."""

    async def story(engine: VLLMEngine) -> None:
        await engine.generate([1], Sampling())

    run(vllm_server, story, functools.partial(VLLMEngine, context=CONTEXT))
    with pytest.raises(ValueError, match=rf"takes at most {CONTEXT} tokens \(prompt plus answer\)"):
        run(vllm_server, story, functools.partial(VLLMEngine, context=CONTEXT + 1))


def test_many_long_prompts_at_once(vllm_server: RealServer, policies: dict) -> None:
    """12 x 900 tokens do not fit into one step; a prompt in chunks kills vLLM on a CPU where requests have seeds."""

    async def story(engine: VLLMEngine) -> None:
        await engine.load_weights(weights(policies[0]), 0)
        prompts = [[n, *range(1, 450), *range(1, 450)] for n in range(12)]
        samplings = [Sampling(max_tokens=4, seed=n) for n in range(12)]
        answers = await asyncio.gather(*(engine.generate(*pair) for pair in zip(prompts, samplings, strict=True)))
        assert max(distance(p, a, policies) for p, a in zip(prompts, answers, strict=True)) <= EXACT
        assert not engine.faults

    run(vllm_server, story)


def test_new_weights_while_requests_are_in_flight(vllm_server: RealServer, policies: dict) -> None:
    """Each token is of the version it is said to be of, computed on keys and values of that version alone."""

    prompts = [[n, 9, 8, 7] for n in range(6)]

    async def answers_over_two_loads(engine: VLLMEngine, pause: float) -> list[Generation]:
        await engine.load_weights(weights(policies[0]), 0)
        requests = [
            asyncio.create_task(engine.generate(p, Sampling(max_tokens=900, seed=n))) for n, p in enumerate(prompts)
        ]
        for version in (1, 2):
            await asyncio.sleep(pause)
            await engine.load_weights(weights(policies[version]), version)
        return await asyncio.gather(*requests)

    async def story(engine: VLLMEngine) -> None:
        # How fast the server is depends on the machine: on some pause a load falls into the middle of the answers.
        for pause in (0.3, 0.6, 0.1, 1.2, 2.4):
            answers = await answers_over_two_loads(engine, pause)
            if any(len(set(answer.versions)) > 1 for answer in answers):
                break
        else:
            pytest.fail("no load fell into the middle of an answer")
        assert all(list(answer.versions) == sorted(answer.versions) for answer in answers)
        assert max(distance(p, a, policies) for p, a in zip(prompts, answers, strict=True)) <= EXACT
        mixed = max(range(6), key=lambda n: len(set(answers[n].versions)))
        wrong = dict.fromkeys(range(3), policies[0])
        assert distance(prompts[mixed], answers[mixed], wrong) > 0.1
        assert not engine.faults

    run(vllm_server, story)


def test_cached_prefix_is_dropped_with_the_old_weights(vllm_server: RealServer, policies: dict) -> None:
    async def story(engine: VLLMEngine) -> None:
        prompt = [3, 1, 4, 1, 5, 9, 2, 6] * 16
        for version in (0, 1, 2, 0):
            await engine.load_weights(weights(policies[version]), version)
            for seed in range(2):  # the second one finds the prefix of the first
                answer = await engine.generate(prompt, Sampling(max_tokens=8, seed=seed))
                assert answer.versions == (version,) * 8 and distance(prompt, answer, policies) <= EXACT

    run(vllm_server, story)


@pytest.mark.parametrize("kind", [VLLMEngine, BroadcastEngine])
def test_every_sync_is_exact(vllm_server: RealServer, kind: Callable[..., Any]) -> None:
    """Of a model with a head of its own; test_vllm_export.py has a tied one."""
    check_three_syncs(kind, vllm_server)


def test_refused_weights_leave_the_old_ones(vllm_server: RealServer, policies: dict) -> None:
    bad = {
        "is missing": [("model.norm.weight", torch.ones(64))],
        "has shape": [(n, t[:-1] if "norm" in n else t) for n, t in policies[1].state_dict().items()],
        "is not finite": [(n, t / 0 if "norm" in n else t) for n, t in policies[1].state_dict().items()],
        "is no tensor": [*policies[1].state_dict().items(), ("model.extra.weight", torch.ones(2))],
    }

    async def story(engine: VLLMEngine) -> None:
        await engine.load_weights(weights(policies[2]), 2)
        for words, stream in bad.items():
            with pytest.raises(RuntimeError, match=words):
                await engine.load_weights(stream, 1)
        assert engine.version == 2
        answer = await engine.generate([1, 2, 3], Sampling(max_tokens=32, seed=4))
        assert answer.versions == (2,) * 32 and distance([1, 2, 3], answer, policies) <= EXACT

    run(vllm_server, story)


def test_trainer_that_died_within_an_update(vllm_server: RealServer, policies: dict) -> None:
    """It leaves the server paused and an update begun; the next trainer goes on as if nothing had been."""
    for path in ("/pause?mode=keep&clear_cache=true", "/start_weight_update"):
        request = urllib.request.Request(vllm_server.url + path, b"{}", {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=60).close()

    async def story(engine: VLLMEngine) -> None:
        await engine.load_weights(weights(policies[1]), 1)
        answer = await engine.generate([4, 5], Sampling(max_tokens=16))
        assert answer.versions == (1,) * 16 and distance([4, 5], answer, policies) <= EXACT

    run(vllm_server, story)


def test_weights_over_the_network(vllm_server: RealServer, policies: dict) -> None:
    """The same server takes broadcasts: exact, also under way; what is refused, or not the trainer's, never serves."""
    wrong = ProbedWeights(list(policies[2].state_dict().items()), weights(policies[0]).probe)
    bad = {
        "has shape": [(n, t[:-1] if "norm" in n else t) for n, t in policies[2].state_dict().items()],
        "is not finite": [(n, t / 0 if "norm" in n else t) for n, t in policies[2].state_dict().items()],
        "other log-probs than the trainer": wrong,
    }

    async def story(engine: BroadcastEngine) -> None:
        await engine.load_weights(weights(policies[2]), 2)
        under_way = asyncio.create_task(engine.generate([6, 5], Sampling(max_tokens=900, seed=3)))
        await asyncio.sleep(0.3)
        await engine.load_weights(weights(policies[1]), 1)
        assert distance([6, 5], await under_way, policies) <= EXACT
        for words, stream in bad.items():
            with pytest.raises(RuntimeError, match=words):
                await engine.load_weights(stream, 2)
            answer = await engine.generate([1, 2, 3], Sampling(max_tokens=32, seed=4))
            assert answer.versions == (1,) * 32 and distance([1, 2, 3], answer, policies) <= EXACT

    run(vllm_server, story, BroadcastEngine)


def test_trainer_that_died_within_a_broadcast(vllm_server: RealServer, policies: dict) -> None:
    """A mixture of two models is left: not a token is sampled from it before the next trainer's weights are there."""
    script = [sys.executable, HELPERS / "dying_broadcaster.py", vllm_server.url, str(VOCAB), vllm_server.model]
    assert subprocess.run(script, timeout=LONG).returncode == 9
    with urllib.request.urlopen(vllm_server.url + "/is_paused", timeout=60) as answer:
        assert json.load(answer) == {"is_paused": True}

    async def story(engine: BroadcastEngine) -> None:
        await engine.load_weights(weights(policies[2]), 2)
        answer = await engine.generate([4, 5], Sampling(max_tokens=16))
        assert answer.versions == (2,) * 16 and distance([4, 5], answer, policies) <= EXACT

    run(vllm_server, story, BroadcastEngine)


@pytest.fixture
def hanging_up(vllm_server: RealServer) -> Iterator[str]:
    """The server's URL through a proxy that cuts each 7th generation off."""
    (proxy,) = each = [StandIn("flaky_proxy.py", vllm_server.url, 7)]
    yield from (proxy.url for _ in ended_after(each))


@pytest.mark.parametrize(
    ("parallel", "temperature", "transfer"),
    [
        ("tensor", 1.0, "file"),
        ("tensor", 0.7, "broadcast"),
        ("pipeline", 0.7, "file"),
        ("context", 1.0, "file"),
    ],
)
def test_train_from_the_server(
    vllm_server: RealServer, hanging_up: str, tmp_path: Path, parallel: str, temperature: float, transfer: str
) -> None:
    """Three steps on two ranks; what the trainer computes for the tokens is what the server said as it sampled them."""
    cut = parallel == "context"
    config = tmp_path / "run.yaml"
    config.write_text(
        f"""
defaults: [/algorithm: flash_reinforce, _self_]
output: {tmp_path}/run
model: {{path: {vllm_server.model}, context_length: 256, precision: fp32}}
parallel: {{{parallel}: 2}}
optimizer: {{learning_rate: 1.0e-3, warmup_steps: 0}}
environment: {{name: letters.Letters}}
rollout:
  engine: vllm
  servers: ["{hanging_up if cut else vllm_server.url}"]
  weight_transfer: {transfer}
  temperature: {temperature}
  batch_size: 16
  max_turns: 2
  max_tokens_per_turn: 48
trainer: {{steps: 3}}
"""
    )
    run_ranks(2, "training", str(config))
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(steps) == 3
    tokens = sum(step["policy_tokens"] for step in steps)
    assert tokens > 3000
    assert max(step["logprob_difference_max"] for step in steps) <= EXACT
    assert all(0 < step["weight_sync_logprob_difference"] <= EXACT for step in steps)
    assert all(step["staleness_max"] == 0 and step["servers_lost"] == 0 for step in steps)
    # 16 episodes a step make 16 requests at least, and of any 16 in a row two are cut.
    assert all((step.get("rollout_faults_unreachable", 0) >= 2) == cut for step in steps)
    first = AutoModelForCausalLM.from_pretrained(vllm_server.model).state_dict()
    last = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint").state_dict()
    moved = max(float((a - b).abs().max()) for a, b in zip(first.values(), last.values(), strict=True))
    assert moved > 1e-3  # so the second and third step were sampled from weights that came over the wire
