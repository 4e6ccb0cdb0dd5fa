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
from real_server import CONFIG, CONTEXT, VOCAB, RealServer, rollout_python
from tiny import random_trajectories, write_model
from transformers import AutoModelForCausalLM
from workers.journeys import Journey

from nemo_flashrl.engines import AdapterEngine
from nemo_flashrl.records import Sampling
from nemo_flashrl.rehearsal.warm_start import make_tokenizer
from nemo_flashrl.run.jsonl import read_metrics

EXACT = 1e-4  # nats, fp32 on both sides
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": CONTEXT // 4}
RANK, ALPHA = 4, 10.0
WIDE = {"num_attention_heads": 2, "num_key_value_heads": 2}  # vLLM on a CPU serves no head size below 32
FAMILIES = {
    "llama": WIDE,
    "qwen2": WIDE,
    "qwen3": {"tied": True, "rope_scaling": YARN},  # heads x head size is twice the hidden size
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
    server = RealServer(exported, "rollout.weight_transfer=adapter", f"lora.rank={RANK}")
    try:
        server.wait()
        yield server
    finally:
        server.end()


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


def test_a_server_that_lost_its_adapter_gets_it_again(server: RealServer, exported: Path) -> None:
    """An adapter of `v_proj` in the first layer; vLLM computes what transformers does with the merged matrix."""
    module = "model.layers.0.self_attn.v_proj"
    model = AutoModelForCausalLM.from_pretrained(exported).eval().requires_grad_(False)
    weight = model.get_parameter(f"{module}.weight")
    generator = torch.Generator().manual_seed(1)
    down = torch.randn(RANK, weight.shape[1], generator=generator)
    up = torch.randn(weight.shape[0], RANK, generator=generator)
    tensors = {f"base_model.model.{module}.lora_A.weight": down, f"base_model.model.{module}.lora_B.weight": up}

    def distance(token_ids: tuple[int, ...], said: tuple[float, ...]) -> float:
        scores = torch.log_softmax(model(torch.tensor([[7, *token_ids]])).logits[0, :-1], -1)
        return float((scores.gather(-1, torch.tensor(token_ids)[:, None])[:, 0] - torch.tensor(said)).abs().max())

    async def story() -> None:
        engine = AdapterEngine([server.url], VOCAB, timeout=240.0)
        with pytest.raises(ValueError, match="lora_B.weight is not finite"):
            await engine.load_weights({**tensors, next(reversed(tensors)): up / 0}.items(), 1)
        await engine.load_weights(tensors.items(), 1)
        first = await engine.generate([7], Sampling(max_tokens=64, seed=1))
        assert distance(first.token_ids, first.logprobs) > 0.1  # without the adapter
        weight.add_(up @ down)
        assert distance(first.token_ids, first.logprobs) <= EXACT and first.versions == (1,) * 64
        post(server, "/v1/unload_lora_adapter", {"lora_name": "policy"})
        again = await engine.generate([7], Sampling(max_tokens=64, seed=1))
        assert (again.token_ids, again.versions) == (first.token_ids, first.versions)
        assert engine.faults["version"] == 1
        await engine.close()

    asyncio.run(story())


def test_train_with_adapters_on_the_wire(server: RealServer, exported: Path, tmp_path: Path) -> None:
    """TP2 x PP2, three steps: what the trainer computes is what the server said, and no base weight was sent."""
    config = tmp_path / "run.yaml"
    config.write_text(
        f"""
defaults: [/algorithm: flash_reinforce, _self_]
output: {tmp_path}/run
model: {{path: {exported}, context_length: 256, precision: fp32}}
parallel: {{tensor: 2, pipeline: 2}}
lora: {{rank: {RANK}, alpha: {ALPHA}}}
optimizer: {{learning_rate: 1.0e-2, warmup_steps: 0}}
environment: {{name: letters.Letters}}
rollout:
  engine: vllm
  servers: ["{server.url}"]
  weight_transfer: adapter
  batch_size: 8
  max_turns: 2
  max_tokens_per_turn: 32
trainer: {{steps: 3}}
"""
    )
    before = server.log.read_text()
    run_ranks(4, "training", str(config))
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(steps) == 3 and max(step["logprob_difference_max"] for step in steps) <= EXACT
    said = server.log.read_text()[len(before) :]
    assert said.count("POST /v1/load_lora_adapter") == 4 and "POST /update_weights" not in said
    first = AutoModelForCausalLM.from_pretrained(exported).state_dict()
    last = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint").state_dict()
    moved = {name for name in first if not torch.equal(first[name], last[name])}
    assert len(moved) == 2 * 7  # the second and third batch came from a policy that had moved
