"""A real vLLM server of an exported folder: the live shards' log-probs, and LoRA adapters in place of whole weights."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import HELPERS
from processes import run_ranks
from real_server import CONFIG, CONTEXT, EXACT, VOCAB, RealServer, check_three_syncs, rollout_python, served
from tiny import random_trajectories, write_model
from transformers import AutoModelForCausalLM, PreTrainedModel
from workers.journeys import Journey

from nemo_flashrl.engines import AdapterEngine, BroadcastEngine, VLLMEngine
from nemo_flashrl.records import Generation, Sampling
from nemo_flashrl.rehearsal.warm_start import make_tokenizer
from nemo_flashrl.run.jsonl import read_metrics

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": CONTEXT // 4}
RANK, ALPHA = 4, 10.0
ADAPTERS = ("rollout.weight_transfer=adapter", f"lora.rank={RANK}")
WIDE = {"num_attention_heads": 2, "num_key_value_heads": 2}  # vLLM on a CPU serves no head size below 32
FAMILIES = {
    "llama": WIDE,
    "qwen2": {"tied": True, **WIDE},
    "qwen3": {"rope_scaling": YARN},  # heads x head size is twice the hidden size
    "qwen3_moe": {},
    "mixtral": WIDE,
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory) -> dict[str, Path]:
    """Of every family: to NeMo, TP2 x PP2, a still step, back; beside each folder what its live shards say."""
    if rollout_python() is None:
        pytest.skip("vLLM is not installed here: `make rollout-venv` does it on Linux x86-64")
    root = tmp_path_factory.mktemp("exported")
    for family, fields in FAMILIES.items():
        write_model(root / family, family, max_position_embeddings=CONTEXT, **fields)
        make_tokenizer().save_pretrained(root / family)
    conversions = [("hf_to_nemo", root / family, root / f"{family}-nemo") for family in FAMILIES]
    run_ranks(1, "convert", root / "answers.json", *conversions)
    (root / "trajectories.pkl").write_bytes(pickle.dumps(random_trajectories(8, VOCAB, seed=3)))
    sizes = ("parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2", "model.precision=fp32")
    journeys = {
        family: Journey(root / family, root / f"{family}-nemo", root / f"{family}-end", VOCAB, 2, 2, sizes, probed=True)
        for family in FAMILIES
    }
    run_ranks(4, "journeys", root / "trajectories.pkl", *journeys.values())
    return {family: journey.target for family, journey in journeys.items()}


@pytest.fixture(scope="module")
def exported(ends: dict[str, Path]) -> Path:
    return ends["qwen3"]


@pytest.fixture(scope="module")
def server(exported: Path) -> Iterator[RealServer]:
    with served(exported, *ADAPTERS) as server:
        yield server


def post(server: RealServer, path: str, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=240) as answer:
        return answer.read()


def test_the_folder_answers_as_the_live_shards_do(server: RealServer, exported: Path) -> None:
    token_ids = json.loads(exported.with_suffix(".json").read_text())[0]
    sampling = {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
    answer = json.loads(post(server, "/inference/v1/generate", {"token_ids": token_ids, "sampling_params": sampling}))
    rows = answer["prompt_logprobs"][1:]
    compare([row[str(token)]["logprob"] for row, token in zip(rows, token_ids[1:], strict=True)], exported)


def compare(said: list[float], exported: Path) -> None:
    """Log-probs of all tokens but the first with those of the live shards."""
    logprobs, expected = torch.tensor(said), torch.tensor(json.loads(exported.with_suffix(".json").read_text())[1])
    assert float((logprobs - expected).abs().max()) <= EXACT
    assert float((logprobs - expected.roll(1)).abs().max()) > 0.1  # aligned to the wrong token


@pytest.fixture(scope="module")
def computed(ends: dict[str, Path], tmp_path_factory) -> dict[str, list[float]]:
    """What vLLM computes of the families that no server here serves, with a server's flags."""
    folder = tmp_path_factory.mktemp("computed")
    config, families = folder / "serve.yaml", [family for family in FAMILIES if family != "qwen3"]
    config.write_text(CONFIG.format(folder=folder, model=ends["llama"], context=CONTEXT))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    script = [rollout_python(), "-P", HELPERS / "vllm_logprobs.py", config, *(ends[family] for family in families)]
    done = subprocess.run(script, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return {family: json.loads(ends[family].with_suffix(".vllm.json").read_text()) for family in families}


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "qwen3"])
def test_vllm_computes_a_folder_of_any_family(computed: dict, ends: dict[str, Path], family: str) -> None:
    compare(computed[family], ends[family])


def test_a_tied_head_follows_every_sync(ends: dict[str, Path], tmp_path: Path) -> None:
    """By folder and by broadcast; vLLM's CPU build multiplies by a copy of the head, made when weights are loaded."""
    with served(ends["qwen2"]) as server:
        check_three_syncs(VLLMEngine, server)
        check_three_syncs(BroadcastEngine, server)
        assert "lm_head.weight" in train(server, 1, tmp_path, "optimizer.learning_rate=1e-3")


MODULE = "model.layers.0.self_attn.v_proj"


def make_adapter(weight: torch.Tensor, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """An adapter of `MODULE` under PEFT's names, and what it adds to the matrix `weight`."""
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(RANK, weight.shape[1], generator=generator)
    up = torch.randn(weight.shape[0], RANK, generator=generator)
    return {f"base_model.model.{MODULE}.lora_{side}.weight": t for side, t in (("A", down), ("B", up))}, up @ down


def distance(model: PreTrainedModel, answer: Generation) -> float:
    """Largest difference of log-probs to those of an answer to the prompt 7."""
    scores = torch.log_softmax(model(torch.tensor([[7, *answer.token_ids]])).logits[0, :-1], -1)
    said = torch.tensor(answer.logprobs)
    return float((scores.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0] - said).abs().max())


def test_three_adapters(server: RealServer) -> None:
    """One after another: vLLM computes what transformers does with the merged matrix, and not with the one before.

    Of a tied model: tests/real_weights.
    """
    model = AutoModelForCausalLM.from_pretrained(server.model).eval().requires_grad_(False)
    weight = model.get_parameter(f"{MODULE}.weight")
    base = weight.clone()

    async def story() -> None:
        engine = AdapterEngine([server.url], VOCAB, timeout=240.0)
        for version in (1, 2, 3):
            tensors, product = make_adapter(weight, seed=version)
            await engine.load_weights(tensors.items(), version)
            answer = await engine.generate([7], Sampling(max_tokens=64, seed=version))
            assert answer.versions == (version,) * 64 and distance(model, answer) > 0.1
            weight.copy_(base + product)
            assert distance(model, answer) <= EXACT
        await engine.close()

    asyncio.run(story())


def test_a_server_that_lost_its_adapter_gets_it_again(server: RealServer) -> None:
    model = AutoModelForCausalLM.from_pretrained(server.model).eval().requires_grad_(False)
    weight = model.get_parameter(f"{MODULE}.weight")
    tensors, product = make_adapter(weight, seed=1)

    async def story() -> None:
        engine = AdapterEngine([server.url], VOCAB, timeout=240.0)
        last = next(reversed(tensors))
        with pytest.raises(ValueError, match="lora_B.weight is not finite"):
            await engine.load_weights({**tensors, last: tensors[last] / 0}.items(), 1)
        await engine.load_weights(tensors.items(), 1)
        first = await engine.generate([7], Sampling(max_tokens=64, seed=1))
        weight.add_(product)
        assert distance(model, first) <= EXACT and first.versions == (1,) * 64
        post(server, "/v1/unload_lora_adapter", {"lora_name": "policy"})
        again = await engine.generate([7], Sampling(max_tokens=64, seed=1))
        assert (again.token_ids, again.versions) == (first.token_ids, first.versions)
        assert engine.faults["version"] == 1
        await engine.close()

    asyncio.run(story())


def train(server: RealServer, ranks: int, folder: Path, *overrides: str) -> set[str]:
    """Three steps, in which the trainer computes what the server said; the tensors that have moved."""
    config = folder / "run.yaml"
    config.write_text(
        f"""
defaults: [/algorithm: flash_reinforce, _self_]
output: {folder}/run
model: {{path: {server.model}, context_length: 256, precision: fp32}}
optimizer: {{learning_rate: 1.0e-2, warmup_steps: 0}}
environment: {{name: letters.Letters}}
rollout:
  engine: vllm
  servers: ["{server.url}"]
  batch_size: 8
  max_turns: 2
  max_tokens_per_turn: 32
trainer: {{steps: 3}}
"""
    )
    run_ranks(ranks, "training", str(config), *overrides)
    steps = read_metrics(folder / "run" / "metrics.jsonl")
    assert len(steps) == 3 and max(step["logprob_difference_max"] for step in steps) <= EXACT
    assert all(0 < step["weight_sync_logprob_difference"] <= EXACT for step in steps)
    first = AutoModelForCausalLM.from_pretrained(server.model).state_dict()
    last = AutoModelForCausalLM.from_pretrained(folder / "run" / "checkpoint").state_dict()
    return {name for name in first if not torch.equal(first[name], last[name])}


def test_train_with_adapters_on_the_wire(server: RealServer, tmp_path: Path) -> None:
    """TP2 x PP2; no base weight is sent."""
    before = server.log.read_text()
    parallel = ("parallel.tensor=2", "parallel.pipeline=2")
    moved = train(server, 4, tmp_path, *parallel, *ADAPTERS, f"lora.alpha={ALPHA}")
    said = server.log.read_text()[len(before) :]
    assert said.count("POST /v1/load_lora_adapter") == 4 and "POST /update_weights" not in said
    assert len(moved) == 2 * 7  # the second and third batch came from a policy that had moved
