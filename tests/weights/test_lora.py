"""LoRA: what is trained, what the sampler and an export get, and what a checkpoint holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from plain import VOCAB_SIZE, make_case
from processes import run_ranks
from safetensors.torch import load_file

from nemo_flashrl.run.jsonl import read_json_lines


def test_only_the_product_of_the_factors_changes(tmp_path: Path) -> None:
    """TP2 x PP2, a tied model: after a step the base is bit for bit as it was, every target has moved by rank 2."""
    case = make_case(tmp_path, tied=True)
    overrides = ("parallel.tensor=2", "parallel.pipeline=2", "model.precision=fp32", "model.recompute=full")
    lora = ("lora.rank=2", "lora.alpha=6", "lora.targets=[linear_qkv,linear_proj,linear_fc2]")
    arguments = (case.folder, case.pickled, tmp_path / "end", VOCAB_SIZE, *overrides, *lora)
    run_ranks(4, "still_step", *arguments, learning_rate=0.05)
    start, base, end = (
        load_file(folder / "model.safetensors") for folder in (case.folder, tmp_path / "end.base", tmp_path / "end")
    )
    assert start.keys() == base.keys() == end.keys()
    for name, tensor in start.items():
        assert torch.equal(tensor, base[name]), name
        change = end[name] - tensor
        if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj") and name.endswith("weight"):
            singular = torch.linalg.svdvals(change)
            assert singular[1] > 1e-3 * singular[0] and singular[2] < 1e-5 * singular[0], name
        else:
            assert not change.any(), name


@pytest.fixture(scope="module")
def run(warm_start: Path, tmp_path_factory) -> Path:
    """Two steps at TP=2 with sequence parallelism, then a third after a restart."""
    root = tmp_path_factory.mktemp("lora")
    settings = [
        f"output={root / 'run'}",
        f"model.path={warm_start}",
        "rollout.batch_size=8",
        "checkpoint.every_steps=1",
    ]
    settings += ["lora.rank=4", "lora.alpha=8", "optimizer.learning_rate=0.01", "optimizer.warmup_steps=0"]
    settings += ["parallel.tensor=2", "parallel.sequence=true"]
    for steps in (2, 3):
        run_ranks(2, "training", "rehearsal", *settings, f"trainer.steps={steps}")
    return root / "run"


def test_the_sampler_has_what_the_trainer_computes(run: Path) -> None:
    """Megatron runs base and adapter side by side, the sampler one merged matrix: the same log-probs."""
    steps = read_json_lines(run / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["logprob_difference_max"] < 1e-4 for step in steps)
    assert all(step["grad_norm"] > 0 for step in steps)


def test_exports_of_the_checkpoint(run: Path, warm_start: Path, tmp_path: Path) -> None:
    """The merged policy is the run's own export; base and adapter under PEFT give its logits."""
    calls = [
        ("run_to_hf", run, tmp_path / "policy"),
        ("run_to_hf", run, tmp_path / "adapter", "adapter"),
        ("differences", run / "checkpoint", tmp_path / "policy"),
        ("differences", warm_start, tmp_path / "policy"),
        ("run_to_hf", run, tmp_path / "reference", "reference"),
    ]
    run_ranks(1, "convert", tmp_path / "answers.json", *calls)
    *_, same, moved, reference = json.loads((tmp_path / "answers.json").read_text())
    assert same == []
    assert any("down_proj.weight: " in line for line in moved)
    assert reference.startswith("refused: ") and "reference" in reference

    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(20)[None]
    base = AutoModelForCausalLM.from_pretrained(warm_start)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")(tokens).logits
    before = base(tokens).logits
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")(tokens).logits
    assert (adapted - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (before - expected).abs().max() > 1e-3 * expected.abs().max()
