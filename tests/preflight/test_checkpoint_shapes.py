"""A checkpoint's tensors against its config.json, by the headers of its files alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, write_model

from nemo_flashrl.config import load
from nemo_flashrl.preflight.model import read_model
from nemo_flashrl.preflight.tensors import check_tensors
from nemo_flashrl.weight_sync.hf_reader import HfTensors


def check(folder: Path) -> None:
    check_tensors(HfTensors(folder), json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_what_transformers_writes_is_what_is_wanted(family: str, tied: bool, tmp_path: Path) -> None:
    check(write_model(tmp_path, family, vocab_size=33, tied=tied))


UP, BIAS = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.o_proj.bias"
WRONG = {
    "a row short": (lambda t: {**t, UP: t[UP][:-1].clone()}, rf"{UP} of .* is \(95, 64\), and by .* \(96, 64\)"),
    "missing": (lambda t: {n: v for n, v in t.items() if n != UP}, f"holds no tensor '{UP}'"),
    "foreign": (lambda t: {**t, BIAS: torch.zeros(64), "x": torch.zeros(1)}, f"holds '{BIAS}' and 1 more, which no"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_tensor_that_does_not_fit_is_named(case: str, tmp_path: Path) -> None:
    change, said = WRONG[case]
    file = write_model(tmp_path, vocab_size=33) / "model.safetensors"
    save_file(change(load_file(file)), file)
    with pytest.raises(ValueError, match=said):
        check(tmp_path)


def test_a_vocabulary_of_another_model(tmp_path: Path) -> None:
    write_model(tmp_path, vocab_size=23)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 515}))
    with pytest.raises(
        ValueError, match=r"embed_tokens\.weight of .* is \(23, 64\), and by its config\.json \(515, 64\)"
    ):
        check(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"), [("{}", "model_type, vocab_size, "), ('{"hidden_size": 4}', "vocab_size, intermediate_size, ")]
)
def test_fields_that_config_json_lacks_are_named(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    config = load("rehearsal", ["output=x", f"model.path={tmp_path}"])
    with pytest.raises(ValueError, match=f"config.json has no .*{said}.*: copy it again"):
        read_model(config, 1)
