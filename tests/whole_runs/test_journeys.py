"""Hugging Face -> NeMo -> shards at TP x PP -> one optimizer step that moves nothing -> Hugging Face, every family."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_ranks
from safetensors.torch import load_file
from tiny import LLAMA3_ROPE, random_trajectories, write_model
from workers.journeys import Journey

VOCAB = 515  # no tensor-parallel size divides it
LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
# Family: (fields of the tied model, fields of the untied one); heads x head_dim is never hidden_size, which is 64.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"rope_scaling": LLAMA3_ROPE, "head_dim": 24}, {"dtype": torch.bfloat16, "head_dim": 24}),
    "qwen2": ({"rope_scaling": LINEAR, "head_dim": 24}, {"rope_scaling": YARN, "head_dim": 24}),
    "qwen3": ({"rope_scaling": YARN}, {"rope_scaling": LINEAR}),
    "qwen3_moe": ({}, {"rope_scaling": YARN}),
    "mixtral": ({"rope_scaling": YARN, "head_dim": 24}, {"rope_scaling": LINEAR, "head_dim": 24}),
}
SIZES = ((2, 2), (1, 2), (2, 1))  # tensor x pipeline
CELLS = [(family, *sizes) for family in FAMILIES for sizes in SIZES]


def _source(root: Path, family: str, tensor: int, pipeline: int) -> Path:
    """Tied and untied take turns, so that each size sees both and each family both."""
    tied = (list(FAMILIES).index(family) + SIZES.index((tensor, pipeline))) % 2 == 0
    return root / f"{family}-{'tied' if tied else 'untied'}"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("journeys")
    for family, (tied, untied) in FAMILIES.items():
        write_model(root / f"{family}-tied", family, vocab_size=VOCAB, tied=True, **tied)
        write_model(root / f"{family}-untied", family, vocab_size=VOCAB, **untied)
    return root


@pytest.fixture(scope="module")
def answers(root: Path) -> dict[str, list[str]]:
    """What differs from the source, by the folder that is compared with it."""
    sources = [root / f"{family}-{name}" for family in FAMILIES for name in ("tied", "untied")]
    calls = [("hf_to_nemo", source, source.with_suffix(".nemo")) for source in sources]
    run_ranks(1, "convert", root / "nemo.json", *calls)
    trajectories = root / "trajectories.pkl"
    trajectories.write_bytes(pickle.dumps(random_trajectories(8, VOCAB, seed=3)))
    journeys = [_journey(root, *cell) for cell in CELLS]
    moved = _journey(root, "qwen3", 2, 1, learning_rate=0.01)
    for tensor, pipeline in SIZES:
        alike = [j for j in [*journeys, moved] if (j.tensor, j.pipeline) == (tensor, pipeline)]
        run_ranks(tensor * pipeline, "journeys", trajectories, *alike)
    pairs = [(s, s.with_suffix(".nemo")) for s in sources] + [(j.source, j.target) for j in [*journeys, moved]]
    run_ranks(1, "convert", root / "answers.json", *[("differences", *pair) for pair in pairs])
    found = json.loads((root / "answers.json").read_text())
    return {other.name: lines for (_, other), lines in zip(pairs, found, strict=True)}


def _journey(root: Path, family: str, tensor: int, pipeline: int, learning_rate: float = 0.0) -> Journey:
    source = _source(root, family, tensor, pipeline)
    dtype = json.loads((source / "config.json").read_text())["dtype"]
    overrides = [f"parallel.tensor={tensor}", f"parallel.pipeline={pipeline}"]
    overrides += [f"model.precision={'bf16' if dtype == 'bfloat16' else 'fp32'}", f"parallel.sequence={tensor > 1}"]
    target = root / f"{family}-{tensor}-{pipeline}-{learning_rate:g}"
    nemo = source.with_suffix(".nemo")
    return Journey(source, nemo, target, VOCAB, tensor, pipeline, tuple(overrides), learning_rate)


@pytest.mark.parametrize("name", [f"{family}-{name}" for family in FAMILIES for name in ("tied", "untied")])
def test_megatrons_logits_are_transformers(answers, name: str) -> None:
    """`differences` computes the NeMo folder by Megatron: within 1e-5 of the largest logit, where all else is equal."""
    assert answers[f"{name}.nemo"] == []


@pytest.mark.parametrize(("family", "tensor", "pipeline"), CELLS)
def test_a_step_without_a_learning_rate_changes_nothing(root: Path, answers, family, tensor, pipeline) -> None:
    """Forward, backward and Adam between reading and writing: tensors bit for bit, configuration field by field."""
    target = root / f"{family}-{tensor}-{pipeline}-0"
    assert answers[target.name] == []
    one, other = (load_file(f / "model.safetensors") for f in (_source(root, family, tensor, pipeline), target))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_step_with_one_is_seen(root: Path, answers) -> None:
    """So the steps above were steps: Adam's first moves an element by the rate, which warm-up begins at a fifth of."""
    moved = load_file(root / "qwen3-2-1-0.01" / "model.safetensors")
    source = load_file(_source(root, "qwen3", 2, 1) / "model.safetensors")
    assert moved.keys() == source.keys() and answers["qwen3-2-1-0.01"] != []
    largest = {name: float((moved[name] - source[name]).abs().max()) for name in source}
    assert all(change == pytest.approx(0.01 / 5, rel=1e-2) for change in largest.values()), largest
