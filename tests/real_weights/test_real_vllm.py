"""A trained model in a vLLM server: before and after three syncs, Megatron's log-probs are those of the sampler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from processes import run_ranks
from real_models import DEMO, SHORT
from real_server import EXACT, RealServer, served
from safetensors.torch import load_file

from nemo_flashrl.run.jsonl import read_metrics

RANK = 4
ADAPTERS = ("rollout.weight_transfer=adapter", f"lora.rank={RANK}")


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[RealServer]:
    with served(smollm2, *ADAPTERS) as server:
        yield server


@pytest.mark.parametrize("transfer", ["adapter", "file", "broadcast"])
def test_megatron_and_vllm_agree_after_every_sync(server: RealServer, tmp_path: Path, transfer: str) -> None:
    """The demo, four steps: the first batch is of the weights as they came, the others of what has been synced.

    Adapters come first: they are of the weights that the server began with.
    """
    rate, lora = ("1e-3", ADAPTERS[1:]) if transfer == "adapter" else ("2e-5", ())
    settings = [f"output={tmp_path / 'run'}", f"model.path={server.model}", f"optimizer.learning_rate={rate}", *SHORT]
    settings += ["trainer.steps=4", "rollout.engine=vllm", f"rollout.servers=[{server.url}]"]
    settings += [f"rollout.weight_transfer={transfer}", *lora]
    run_ranks(1, "training", str(DEMO / "demo.yaml"), *settings)
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(steps) == 4 and all(step["logprob_difference_max"] <= EXACT for step in steps)
    assert all(0 < step["weight_sync_logprob_difference"] <= EXACT for step in steps)
    assert all(step["grad_norm"] > 0 for step in steps)
    one, other = (load_file(f / "model.safetensors") for f in (server.model, tmp_path / "run" / "checkpoint"))
    moved = max(float((one[name] - other[name]).abs().max()) for name in one)
    assert moved > 1e-5 and not torch.equal(*(m["model.layers.0.self_attn.q_proj.weight"] for m in (one, other)))
