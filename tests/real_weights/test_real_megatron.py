"""A trained model in Megatron: 9 heads and 3 of keys and values, tied embeddings, 30 layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from processes import run_ranks
from real_models import DEMO, MESSAGES, SHORT
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_flashrl.config import load
from nemo_flashrl.preflight.prepare import prepare
from nemo_flashrl.run.jsonl import read_json_lines, read_metrics


@pytest.fixture(scope="module")
def tokens(smollm2: Path) -> list[int]:
    return AutoTokenizer.from_pretrained(smollm2).apply_chat_template(MESSAGES)


@pytest.fixture(scope="module")
def right(smollm2: Path, tokens: list[int]) -> dict[torch.dtype, torch.Tensor]:
    """transformers' logits [S, V]."""
    answers = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=dtype)
        with torch.no_grad():
            answers[dtype] = model(torch.tensor([tokens])).logits[0].float()
    return answers


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (3, 1), (1, 2)], ids=["alone", "TP3", "PP2"])
def test_logits_are_transformers(smollm2, tokens, right, tmp_path, tensor: int, pipeline: int) -> None:
    """In bf16 both round, each in an order of its own: Megatron is no farther from fp32 than transformers is."""
    run_ranks(tensor * pipeline, "real_logits", tmp_path / "logits.pt", smollm2, tokens, tensor, pipeline)
    found = torch.load(tmp_path / "logits.pt")
    exact, rounded = right[torch.float32], right[torch.bfloat16]
    assert (found["torch.float32"] - exact).abs().max() <= 1e-5 * exact.abs().max()
    own = (found["torch.bfloat16"].float() - exact).norm()
    assert own <= 1.1 * (rounded - exact).norm()
    assert own > 100 * (found["torch.float32"] - exact).norm()


def test_heads_that_no_size_divides_are_refused(smollm2: Path, tmp_path: Path) -> None:
    settings = [f"output={tmp_path / 'run'}", f"model.path={smollm2}", "parallel.tensor=2"]
    with pytest.raises(ValueError, match=r"parallel\.tensor=2.*9"):
        prepare(load(str(DEMO / "demo.yaml"), settings), 2)


def test_to_nemo_and_back_bit_for_bit(smollm2: Path, tmp_path: Path) -> None:
    nemo, back = tmp_path / "nemo", tmp_path / "back"
    calls = [("hf_to_nemo", smollm2, nemo), ("nemo_to_hf", nemo, back)]
    run_ranks(1, "convert", tmp_path / "answers.json", *calls)
    assert json.loads((tmp_path / "answers.json").read_text()) == [str(nemo), str(back)]
    one, other = (load_file(folder / "model.safetensors") for folder in (smollm2, back))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        assert (smollm2 / name).read_text() == (back / name).read_text(), name


def test_lora_in_a_conversation_with_a_tool(smollm2: Path, tmp_path: Path) -> None:
    """Steps of the demo: what Megatron computes with base and adapter, transformers sampled with both merged."""
    settings = [f"output={tmp_path / 'run'}", f"model.path={smollm2}", "lora.rank=4", "lora.alpha=8", *SHORT]
    settings += ["environment.settings.operations=2", "rollout.max_turns=2", "rollout.batch_size=4"]
    settings += ["optimizer.learning_rate=1e-3", "trainer.steps=2"]
    run_ranks(1, "training", str(DEMO / "demo.yaml"), *settings)
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(steps) == 2 and all(step["logprob_difference_max"] <= 1e-4 for step in steps)
    assert steps[0]["grad_norm"] > 0
    assert max(t["turns"] for t in read_json_lines(tmp_path / "run" / "trajectories.jsonl")) > 1
    one, other = (load_file(f / "model.safetensors") for f in (smollm2, tmp_path / "run" / "checkpoint"))
    moved = {name for name in one if not torch.equal(one[name], other[name])}
    assert moved == {name for name in one if name.endswith("_proj.weight")}
    assert torch.linalg.matrix_rank(other[min(moved)] - one[min(moved)], rtol=1e-3) <= 4
