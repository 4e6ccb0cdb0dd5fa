"""Model folders as they come: written by transformers 5, cloned without Git LFS, named as on the hub, with YaRN."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_ranks
from tiny import write_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_flashrl.cli import main as flashrl
from nemo_flashrl.config import load
from nemo_flashrl.engines.transformers import TransformersEngine
from nemo_flashrl.preflight.model import read_model, read_tokenizer
from nemo_flashrl.records import Sampling
from nemo_flashrl.rehearsal.warm_start import make_tokenizer, make_warm_start
from nemo_flashrl.rollout_server.model_check import check_model
from nemo_flashrl.weight_sync.hf_config import read_config
from nemo_flashrl.weight_sync.hf_reader import HfTensors

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 3441185608\n"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def as_transformers_5(source: Path, target: Path) -> Path:
    """The folder as transformers 5.24 writes it: RoPE's fields in one, which transformers 4 does not read."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    theta, scaling = config.pop("rope_theta"), config.pop("rope_scaling", None)
    config["rope_parameters"] = {"rope_theta": theta, **(scaling or {"rope_type": "default"})}
    (target / "config.json").write_text(json.dumps({**config, "transformers_version": "5.24.0"}))
    return target


def logits(model: Any, length: int) -> torch.Tensor:
    tokens = torch.arange(length)[None] % 515
    with torch.no_grad():
        return model.eval()(tokens).logits


def call(out: Path, *calls: tuple) -> list:
    run_ranks(1, "convert", out, *calls)
    return json.loads(out.read_text())


@pytest.mark.parametrize("family", ["qwen2", "llama", "mixtral"])
@pytest.mark.parametrize("scaling", [None, YARN])
def test_the_sampler_reads_a_configuration_of_transformers_5(family: str, scaling: Any, tmp_path: Path) -> None:
    old = write_model(tmp_path / "4", family, rope_theta=5e5, rope_scaling=scaling, head_dim=16)
    new = as_transformers_5(old, tmp_path / "5")
    right = logits(AutoModelForCausalLM.from_pretrained(old), 100)
    assert not torch.allclose(logits(AutoModelForCausalLM.from_pretrained(new), 100), right)  # the trap
    assert torch.equal(logits(TransformersEngine(new)._model, 100), right)
    assert (read_config(new)["rope_theta"], read_config(new)["rope_scaling"]) == (5e5, scaling)
    assert read_config(old) == json.loads((old / "config.json").read_text())


def test_what_is_converted_from_transformers_5_loads_in_4_and_in_5(tmp_path: Path) -> None:
    models = {"qwen3": {"rope_theta": 5e5, "rope_scaling": YARN}, "llama": {"rope_theta": 5e5}}
    calls = []
    for family, fields in models.items():
        source = as_transformers_5(write_model(tmp_path / f"{family}4", family, **fields), tmp_path / family)
        nemo, back = tmp_path / f"{family}.nemo", tmp_path / f"{family}.back"
        calls += [("hf_to_nemo", source, nemo), ("nemo_to_hf", nemo, back)]
        calls += [("differences", source, nemo), ("differences", tmp_path / f"{family}4", back)]
    answers = call(tmp_path / "answers.json", *calls)
    assert answers[2::4] == [[], []]  # logits among them: Megatron's and transformers'
    for family, fields in models.items():
        exported = json.loads((tmp_path / f"{family}.back" / "config.json").read_text())
        scaling = fields.get("rope_scaling")
        assert (exported["rope_theta"], exported["rope_scaling"]) == (5e5, scaling)  # for transformers 4
        assert exported["rope_parameters"] == {"rope_theta": 5e5, **(scaling or {"rope_type": "default"})}  # for 5
        one, other = (
            logits(AutoModelForCausalLM.from_pretrained(tmp_path / f"{family}{n}"), 64) for n in ("4", ".back")
        )
        assert torch.equal(one, other)


def refusal(folder: Path, *overrides: str) -> str:
    config = load("rehearsal", ["output=none", f"model.path='{folder}'", *overrides])
    try:
        read_model(config, 1)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("positions", "scaling", "limit"),
    [
        (32, YARN, 128),  # as model cards give it
        (128, YARN, 128),
        (32, {"type": "yarn", "factor": 2.0}, 64),
        (32, None, 32),
        (32, {"rope_type": "linear", "factor": 4.0}, 32),
    ],
)
def test_yarns_factor_lengthens_the_context(positions: int, scaling: Any, limit: int, tmp_path: Path) -> None:
    folder = write_model(tmp_path, max_position_embeddings=positions)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_scaling": scaling}))
    assert refusal(folder, f"model.context_length={limit}") == ""
    said = f"model.context_length={limit + 1}: the model's max_position_embeddings is {positions}"
    said += f" and its RoPE scaling makes {limit} of them" if limit > positions else ""
    assert refusal(folder, f"model.context_length={limit + 1}") == said
    prompt = list(range(limit - 1))
    answer = asyncio.run(TransformersEngine(folder).generate(prompt, Sampling(temperature=0.0, max_tokens=1)))
    reference = logits(AutoModelForCausalLM.from_pretrained(folder), limit - 1)[0, -1]
    assert answer.token_ids == (int(reference.argmax()),)


def test_git_lfs_pointers_are_named(tmp_path: Path) -> None:
    source = make_warm_start(tmp_path / "model", steps=0)
    readers = {
        "config.json": [lambda folder: check_model(folder, accelerated=True), read_config],
        "tokenizer.json": [read_tokenizer],
        "tokenizer_config.json": [read_tokenizer],
        "model.safetensors": [HfTensors],
    }
    for name, functions in readers.items():
        folder = shutil.copytree(source, tmp_path / name)
        (folder / name).write_text(POINTER)
        for read in functions:
            with pytest.raises(
                ValueError, match=r"is a Git LFS pointer, not the file itself: run `git lfs pull`"
            ) as raised:
                read(folder)
            assert str(raised.value).startswith(str(folder / name))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "holds no tokenizer, none of tokenizer.json, tokenizer.model, vocab.json: copy it from the model"),
        ("{}", "holds no loadable tokenizer ("),
        ("[", "holds no loadable tokenizer ("),
        ('{"version": "1.0", "model": {"type": "Magic"}}', "holds no loadable tokenizer ("),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_one_line(text: str | None, said: str, tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"model.path={str(tmp_path)!r} {said}")) as raised:
        read_tokenizer(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_tokenizer_that_transformers_5_has_saved(tmp_path: Path) -> None:
    """tokenizer_config.json as transformers 5.24 writes it; tokenizer.json has the same form in both."""
    right = make_tokenizer()
    right.add_special_tokens({"additional_special_tokens": ["<start>", "<end>"]})
    right.save_pretrained(tmp_path / "4")
    shutil.copytree(tmp_path / "4", tmp_path / "5")
    settings = {
        **{"backend": "tokenizers", "clean_up_tokenization_spaces": False, "eos_token": "<eos>", "is_local": True},
        **{"extra_special_tokens": ["<start>", "<end>"], "local_files_only": False, "model_max_length": 128},
        **{"pad_token": "_", "tokenizer_class": "TokenizersBackend", "unk_token": "<unk>"},
    }
    (tmp_path / "5" / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(Exception, match="TokenizersBackend|has no attribute 'keys'"):
        AutoTokenizer.from_pretrained(tmp_path / "5")  # the trap
    write_model(tmp_path / "5", "qwen3")
    (tmp_path / "copy").mkdir()
    assert call(
        tmp_path / "answers.json",
        ("hf_to_nemo", tmp_path / "5", tmp_path / "nemo"),
        ("nemo_to_hf", tmp_path / "nemo", tmp_path / "back"),
    ) == [str(tmp_path / "nemo"), str(tmp_path / "back")]
    text = "<start> Q k 2 9 : <end> <eos>"
    for tokenizer in (read_tokenizer(tmp_path / "5"), AutoTokenizer.from_pretrained(tmp_path / "back")):
        assert tokenizer(text).input_ids == right(text).input_ids
        assert set(tokenizer.all_special_tokens) == set(right.all_special_tokens)
        assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (right.eos_token_id, right.pad_token_id)
    assert len(read_tokenizer(tmp_path / "4")) == len(read_tokenizer(tmp_path / "5")) == len(right)


def test_a_name_on_the_hub_gets_the_command_that_downloads_it(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert flashrl(["train", "rehearsal", "output=run", "model.path=HuggingFaceTB/SmolLM2-135M-Instruct"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    local = "models/SmolLM2-135M-Instruct"
    assert line.startswith("flashrl train: model.path='HuggingFaceTB/SmolLM2-135M-Instruct': no such folder; it looks")
    assert line.endswith(
        f"run `hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir {local}` and set model.path={local}"
    )
    for path in ("/data/models/qwen", "models/a/b", "./model", "model"):
        with pytest.raises(ValueError, match="no such folder; give a Hugging Face checkpoint folder"):
            check_model(Path(path), accelerated=True)


def test_named_chat_templates_are_kept(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", "qwen3", tied=True)
    tokenizer = make_tokenizer()
    templates = {"default": "{{ messages[0].content }}", "tool_use": "{{ messages[0].content }} tool"}
    tokenizer.chat_template = templates
    tokenizer.save_pretrained(source)
    assert [file.name for file in (source / "additional_chat_templates").iterdir()] == ["tool_use.jinja"]
    nemo, back = tmp_path / "nemo", tmp_path / "back"
    assert call(tmp_path / "answers.json", ("hf_to_nemo", source, nemo), ("nemo_to_hf", nemo, back)) == [
        str(nemo),
        str(back),
    ]
    assert AutoTokenizer.from_pretrained(back).chat_template == templates
