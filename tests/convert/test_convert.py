"""`flashrl convert`: Hugging Face -> NeMo -> shards -> Hugging Face, bit for bit, and what it refuses."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from paths import TESTS
from processes import run_ranks
from safetensors.torch import load_file, save_file
from tiny import LLAMA3_ROPE, write_model
from transformers import AutoTokenizer

from nemo_flashrl.cli import main as flashrl
from nemo_flashrl.rehearsal.warm_start import make_tokenizer
from nemo_flashrl.weight_sync.hf_writer import new_folder

OLD_RUN = TESTS / "fixtures" / "run"  # written by version 0.1.0
YARN = {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.4}
NEMOS_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
MODELS = {  # folder: family, fields of config.json
    "qwen3": ("qwen3", {"tied": True, "bos_token_id": 3, "eos_token_id": 5}),
    "qwen3_moe": ("qwen3_moe", {}),
    "mixtral": ("mixtral", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama": ("llama", {"rope_scaling": LLAMA3_ROPE, "dtype": torch.bfloat16}),
    "qwen2": ("qwen2", {"rope_scaling": YARN, "tied": True}),
}


def call(out: Path, *calls: tuple, **options) -> list:
    run_ranks(1, "convert", out, *calls, **options)
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("convert")
    for name, (family, fields) in MODELS.items():
        write_model(root / name, family, **fields)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(root / "qwen3")
    (root / "qwen3" / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [5, 7]}')
    return root


@pytest.fixture(scope="module")
def answers(root: Path) -> dict[tuple, object]:
    """To NeMo and back, compared on both sides; NeMo's loader; an export whose original config.json is gone."""
    nemo, back = {m: root / f"{m}.nemo" for m in MODELS}, {m: root / f"{m}.back" for m in MODELS}
    calls = [("hf_to_nemo", root / m, nemo[m]) for m in MODELS]
    calls += [("nemo_to_hf", nemo[m], back[m]) for m in MODELS]
    calls += [("differences", root / m, folder[m]) for m in MODELS for folder in (nemo, back)]
    calls += [("load_with_nemo", nemo[m]) for m in MODELS]
    found = dict(zip([tuple(map(str, c)) for c in calls], call(root / "answers.json", *calls), strict=True))
    for model in MODELS:
        (nemo[model] / "context" / "nemo_tokenizer" / "config.json").unlink()
    calls = [("nemo_to_hf", nemo[m], root / f"{m}.made") for m in MODELS]
    calls += [("differences", root / "llama", root / "qwen2")]
    return found | dict(zip([tuple(map(str, c)) for c in calls], call(root / "answers.json", *calls), strict=True))


@pytest.mark.parametrize("model", MODELS)
def test_weights_and_configuration_travel(root: Path, answers, model: str) -> None:
    assert answers["differences", str(root / model), str(root / f"{model}.nemo")] == []
    assert answers["differences", str(root / model), str(root / f"{model}.back")] == []
    one, other = (load_file(root / folder / "model.safetensors") for folder in (model, f"{model}.back"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    for file in ("config.json", "generation_config.json"):
        assert (root / model / file).read_bytes() == (root / f"{model}.back" / file).read_bytes()


def test_the_tokenizer_travels(root: Path, answers) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        assert (root / "qwen3" / file).read_bytes() == (root / "qwen3.back" / file).read_bytes()
    assert "qwen3.nemo" in (root / "qwen3.back" / "README.md").read_text()


@pytest.mark.parametrize("model", MODELS)
def test_nemo_itself_loads_it(root: Path, answers, model: str) -> None:
    loaded = answers["load_with_nemo", str(root / f"{model}.nemo")]
    config = {"llama": "Llama31Config", "qwen2": "YarnQwen2Config", "mixtral": "MixtralConfig8x7B"}
    assert loaded["config"] == config.get(model, "Qwen3MoEConfig" if model == "qwen3_moe" else "Qwen3Config")
    assert loaded["tokenizer"] == ("AutoTokenizer" if model == "qwen3" else "NoneType")
    expected = sum(float(t.double().sum()) for t in load_file(root / model / "model.safetensors").values())
    assert loaded["sum"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("model", MODELS)
def test_a_configuration_made_from_nemos_is_the_same_model(root: Path, answers, model: str) -> None:
    """What NeMo never knew (bos of a checkpoint without tokenizer, say) cannot come back."""
    one, other = (json.loads((root / name / "config.json").read_text()) for name in (model, f"{model}.made"))
    named = {"rope_theta", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings", "vocab_size", "head_dim"}
    named |= {n for n in one if n.startswith("num_") or n.endswith("_size")} | {"model_type", "architectures", "dtype"}
    for name in named & one.keys():
        assert other[name] == one[name] or one[name] is None, name
    for name, value in (one["rope_scaling"] or {}).items():
        assert other["rope_scaling"][name] == pytest.approx(value) if name != "rope_type" else value
    assert (
        load_file(root / f"{model}.made" / "model.safetensors").keys()
        == load_file(root / model / "model.safetensors").keys()
    )


def test_differences_are_spelt_out(root: Path, answers) -> None:
    lines = answers["differences", str(root / "llama"), str(root / "qwen2")]
    assert "config.json: model_type is 'llama' and 'qwen2'" in lines
    assert "lm_head.weight: not in the second" in lines
    assert any("self_attn.k_proj.bias: not in the first" in line for line in lines)
    assert any("torch.bfloat16 (515, 64) and torch.float32 (515, 64)" in line for line in lines)


def test_one_element_is_found(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "qwen2", tmp_path / "other")
    tensors = load_file(root / "qwen2" / "model.safetensors")
    tensors["model.norm.weight"][7] += 0.5
    save_file(tensors, tmp_path / "other" / "model.safetensors")
    (line,) = call(tmp_path / "answers.json", ("differences", root / "qwen2", tmp_path / "other"))[0]
    assert line.startswith("model.norm.weight: 1 of 64 elements differ, by at most 0.5; the first, [7], is ")


def test_a_checkpoint_of_nemos_own_import(root: Path, tmp_path: Path) -> None:
    """`llm.import_ckpt` of NeMo, then the command with which training refuses its folder, as a user pastes it.

    NeMo keeps no config.json. What it does not know either (Qwen 3's positions, bos and eos of a checkpoint) is written
    from its own configuration and the tokenizer; with `--reference` nothing differs.
    """
    sources = {
        "llama": {"rope_scaling": {**LLAMA3_ROPE, **NEMOS_LLAMA3}},
        "qwen2": {},
        "qwen3": {"head_dim": 128, "tied": True},
    }
    for family, fields in sources.items():
        make_tokenizer().save_pretrained(write_model(tmp_path / family, family, **fields))
    imports = [(tmp_path / family, tmp_path / f"{family} nemo") for family in sources]
    refusal = [("refuse_training", nemo) for _, nemo in imports]
    run_ranks(1, "nemo_import", tmp_path / "answers.json", imports, *refusal)
    commands = [re.search("`flashrl (.+?)`", text)[1] for text in json.loads((tmp_path / "answers.json").read_text())]
    calls = [("flashrl", *shlex.split(command)) for command in commands]
    calls += [("nemo_to_hf", nemo, f"{source}-reference", source) for source, nemo in imports]
    calls += [("differences", source, f"{source}-reference") for source, _ in imports]
    calls += [("differences", source, f"{nemo}-hf") for source, nemo in imports]
    found = call(tmp_path / "answers.json", *calls)
    assert found[:3] == [0, 0, 0] and found[6:9] == [[], [], []]
    assert all(line.startswith("config.json: ") for lines in found[9:] for line in lines)
    unknown = {line.split()[1] for lines in found[9:] for line in lines}
    assert unknown <= {"bos_token_id", "eos_token_id", "pad_token_id", "head_dim", "max_position_embeddings"}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "qwen3 nemo-hf")
    assert tokenizer.get_vocab() == make_tokenizer().get_vocab()


def _broken(root: Path, kind: str, source: Path) -> Path:
    """A copy of `source` with one thing wrong."""
    folder = root / kind
    shutil.copytree(source, folder)
    file, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    tensors = load_file(file)
    if kind == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    if kind == "corrupt":
        file.write_bytes(b"\xff" * 64 + file.read_bytes()[64:])
    if kind == "extra":
        save_file({**tensors, "model.layers.0.self_attn.o_proj.bias": torch.zeros(64)}, file)
    if kind == "lacking":
        save_file({k: v for k, v in tensors.items() if k != "model.norm.weight"}, file)
    if kind == "lost":
        tensors["model.layers.1.mlp.down_proj.weight"][2, 3] = float("nan")
        save_file(tensors, file)
    if kind == "index":
        index = {"weight_map": dict.fromkeys(tensors, "model-00002-of-00002.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    changes = {"wrong config": {"hidden_size": 32}, "family": {"model_type": "gpt2"}, "rope": {"rope_scaling": {}}}
    changes["rope"] = {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}
    changes["bias"] = {"hidden_act": "gelu"}
    (folder / "config.json").write_text(json.dumps({**config, **changes.get(kind, {})}))
    return folder


REFUSED = {
    "truncated": r"model.safetensors is not a complete safetensors file",
    "corrupt": r"model.safetensors is not a complete safetensors file",
    "extra": "holds 'model.layers.0.self_attn.o_proj.bias', which no parameter of the model takes",
    "lacking": "holds no tensor 'model.norm.weight'",
    "lost": "model.layers.1.mlp.down_proj.weight of ",
    "index": "names model-00002-of-00002.safetensors, which is not there",
    "wrong config": "which is (",
    "family": "supported: llama, mixtral, qwen2, qwen3, qwen3_moe (one entry in nemo_flashrl/models/families.py",
    "rope": "rope_scaling.rope_type='longrope' of a qwen2 model is not supported; supported: default, linear, yarn",
    "bias": "hidden_act='gelu' is not supported, 'silu' alone is",
}


def test_what_is_not_whole_is_refused(root: Path, answers, tmp_path: Path) -> None:
    """The target never appears, nothing else is left beside it, and the source is as it was."""
    folders = {kind: _broken(tmp_path, kind, root / "qwen2") for kind in REFUSED}
    before = {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()}
    shutil.copytree(root / "qwen2.nemo", tmp_path / "torn nemo")
    next((tmp_path / "torn nemo" / "weights").glob("*.distcp")).write_bytes(b"")
    (tmp_path / "targets").mkdir()
    calls = [("hf_to_nemo", folder, tmp_path / "targets" / kind) for kind, folder in folders.items()]
    calls += [
        ("nemo_to_hf", tmp_path / "torn nemo", tmp_path / "targets" / "hf"),
        ("nemo_to_hf", root / "qwen2.nemo", tmp_path / "targets" / "hf", root / "llama"),
        ("hf_to_nemo", root / "qwen2", root / "llama"),
        ("nemo_to_hf", root / "qwen2", tmp_path / "targets" / "hf"),
    ]
    found = call(tmp_path / "answers.json", *calls)
    messages = [*REFUSED.values(), "weights cannot be read", "of another model: ", "exists: an export never"]
    messages.append("is not a NeMo checkpoint")
    for message, text in zip(messages, found, strict=True):
        assert text.startswith("refused: ") and message in text and "\n" not in text, (message, text)
    assert list((tmp_path / "targets").iterdir()) == []
    assert all(file.read_bytes() == content for file, content in before.items())


def test_no_space(root: Path, answers, tmp_path: Path) -> None:
    """Files of 20 kB at most; the smallest tensor file is larger."""
    calls = [("hf_to_nemo", root / "qwen2", tmp_path / "nemo"), ("nemo_to_hf", root / "qwen3.nemo", tmp_path / "hf")]
    found = call(tmp_path / "answers.json", *calls, file_bytes=20_000)
    assert all(text.startswith("refused: ") and "could not be written" in text for text in found), found
    assert "File too large" in found[1]
    assert [p.name for p in tmp_path.iterdir()] == ["answers.json"]


def test_a_run_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    """A run of one step with a reference policy, and the exports that it ended with."""
    command = ("flashrl", "convert", "run-to-hf", str(OLD_RUN))
    calls = [
        (*command, str(tmp_path / "policy")),
        (*command, str(tmp_path / "reference"), "--reference-ema"),
        ("run_to_hf", OLD_RUN, tmp_path / "adapter", "adapter"),
        ("differences", OLD_RUN / "checkpoint", tmp_path / "policy"),
        ("differences", OLD_RUN / "reference", tmp_path / "reference"),
        ("differences", OLD_RUN / "checkpoint", tmp_path / "reference"),
    ]
    *codes, refused, policy, reference, other = call(tmp_path / "answers.json", *calls)
    assert codes == [0, 0]
    assert refused.endswith("was trained without LoRA: it has no adapter")
    assert policy == reference == []
    assert other and all("elements differ, by at most" in line for line in other[:5])
    assert "| optimizer steps | 1 |" in (tmp_path / "policy" / "README.md").read_text()


def test_three_conversions_at_once(root: Path, tmp_path: Path) -> None:
    """Two of them to one place: one is written whole, the other is told, and the third never meets them."""
    jobs = {"one": ("qwen2", "a"), "other": ("qwen2", "a"), "third": ("llama", "b")}
    with ThreadPoolExecutor(3) as pool:
        running = [
            pool.submit(call, tmp_path / f"{name}.json", ("hf_to_nemo", root / source, tmp_path / target))
            for name, (source, target) in jobs.items()
        ]
        answers = [job.result()[0] for job in running]
    assert sorted(text.split(":")[0] for text in answers[:2]) == [str(tmp_path / "a"), "refused"]
    assert {p.name for p in tmp_path.iterdir()} == {"a", "b", *(f"{name}.json" for name in jobs)}
    calls = [
        ("flashrl", "convert", "check", str(root / s), str(tmp_path / t)) for s in ("qwen2", "llama") for t in "ab"
    ]
    assert call(tmp_path / "one.json", *calls) == [0, 1, 1, 0]


def test_two_writers_of_one_folder(tmp_path: Path) -> None:
    """They never see each other's files, and the second is told."""
    with pytest.raises(ValueError, match="exists: an export never overwrites"), new_folder(tmp_path / "a") as one:
        (one / "file").write_text("one")
        with new_folder(tmp_path / "a") as other:
            assert list(other.iterdir()) == []
            (other / "file").write_text("other")
    assert (tmp_path / "a" / "file").read_text() == "other"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_the_command_line(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        flashrl(["convert", "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("hf-to-nemo", "nemo-to-hf", "run-to-hf", "check"))
    for action in ("hf-to-nemo", "nemo-to-hf", "run-to-hf", "check"):
        with pytest.raises(SystemExit) as end:
            flashrl(["convert", action, "--help"])
        assert end.value.code == 0
