"""Hugging Face folder <-> shards: bit for bit, at every TP x PP; the folder that is written loads in transformers."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
import torch
from processes import run_ranks
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, LLAMA3_ROPE, write_model
from workers.weights import Sizes

from nemo_flashrl.weight_sync.folder import WeightsHome, write_folder
from nemo_flashrl.weight_sync.hf_reader import HfTensors
from nemo_flashrl.weight_sync.hf_writer import new_folder, write_peft
from nemo_flashrl.weights.hf_folder import write_hf_folder
from nemo_flashrl.weights.mapping import Place, RuleSizes, find_rule

ROPE = {
    "linear": ("qwen2", {"type": "linear", "factor": 3.0}),
    "llama3": ("llama", LLAMA3_ROPE),
    "yarn": ("qwen3", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}),
    "yarn_moe": ("qwen3_moe", {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, "attention_factor": 1.4}),
    "yarn_mscale": ("mixtral", {"rope_type": "yarn", "factor": 2.0, "mscale": 2.0, "mscale_all_dim": 0.5}),
    "yarn_llama": ("llama", {"rope_type": "yarn", "factor": 8.0, "truncate": False}),
}

# The end of a folder's name says at which sizes it is tried.
SIZES = {
    "untied": (Sizes(tensor=2), Sizes(2, 2)),
    "tied": (Sizes(tensor=2), Sizes(pipeline=2), Sizes(2, 2)),
    "rope": (Sizes(),),
    "experts": (Sizes(2, expert=2), Sizes(pipeline=2, expert=2), Sizes(2, expert=2, expert_tensor=1)),
    "chunks": (Sizes(pipeline=2, chunks=2),),
}


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict[str, dict]:
    root = tmp_path_factory.mktemp("weights")
    folders = [
        write_model(root / f"{family}-{name}", family, tied=name == "tied")
        for family in FAMILIES
        for name in ("tied", "untied")
    ]
    folders += [
        write_model(root / f"{name}-rope", family, rope_scaling=scaling, rope_theta=100.0, head_dim=16)
        for name, (family, scaling) in ROPE.items()
    ]
    folders += [write_model(root / f"{family}-experts", family) for family in ("mixtral", "qwen3_moe")]
    folders += [write_model(root / "llama-chunks", "llama", num_hidden_layers=4, head_dim=24, tied=True)]
    report = {}
    for sizes in dict.fromkeys(sizes for tried in SIZES.values() for sizes in tried):
        tried = [folder for folder in folders if sizes in SIZES[folder.name.rsplit("-")[-1]]]
        run_ranks(4, "weights", root / "report.json", sizes, *tried)
        report |= json.loads((root / "report.json").read_text())
    return report


def test_every_family_returns_bit_equal_at_every_parallel_size(report) -> None:
    # 5 families, tied at 3 sizes and untied at 2; kinds of RoPE; 2 families x 3 expert sizes; a virtual pipeline
    assert len(report) == 25 + len(ROPE) + 6 + 1
    for case, result in report.items():
        assert result["names_equal"], case
        assert result["bit_equal"], case


def test_megatron_logits_equal_transformers(report) -> None:
    differences = {case: r["logits_difference"] for case, r in report.items() if "logits_difference" in r}
    assert len(differences) == 10 + len(ROPE) + 4
    # 515 tokens are padded to 640 and 768 rows; the difference is relative to the largest logit
    assert max(differences.values()) < 1e-5, differences


def test_streaming_holds_two_parameters_at_most(report) -> None:
    """At TP2 x PP2, beyond the model: the shards of the largest parameter and what they are put together to.

    Its 768 rows x 64 x 4 bytes; the whole model would be four times as much again.
    """
    measured = {case: r for case, r in report.items() if "peak" in r}
    assert len(measured) == 10
    for case, result in measured.items():
        assert result["largest"] == 768 * 64 * 4
        assert result["largest"] < result["peak"] <= 2 * result["largest"] + 4096, case


def test_gate_and_up_shards_are_deinterleaved() -> None:
    """TP=2, F=2: rank 0 holds [gate_0; up_0], rank 1 [gate_1; up_1]; plain concatenation would mix them."""
    rule = find_rule("decoder.layers.0.mlp.linear_fc1.weight")
    layout = RuleSizes(vocab_size=3, query_groups=1, heads_per_group=1, head_dim=1, tied=False)
    shards = [torch.tensor([[1.0], [10.0]]), torch.tensor([[2.0], [20.0]])]
    gate, up = rule.to_hf(shards, layout)
    assert gate.tolist() == [[1.0], [2.0]]
    assert up.tolist() == [[10.0], [20.0]]
    back = rule.from_hf([gate, up], layout, Place(1, 2, torch.Size((2, 1))))
    assert torch.equal(back, shards[1])


def test_qkv_is_grouped_by_key_value_group() -> None:
    """2 groups of 2 query heads, head size 1: rows q0 q1 k0 v0 | q2 q3 k1 v1."""
    rule = find_rule("decoder.layers.3.self_attention.linear_qkv.weight")
    layout = RuleSizes(vocab_size=3, query_groups=2, heads_per_group=2, head_dim=1, tied=False)
    shards = [torch.tensor([[0.0], [1.0], [100.0], [200.0]]), torch.tensor([[2.0], [3.0], [101.0], [201.0]])]
    q, k, v = rule.to_hf(shards, layout)
    assert q.flatten().tolist() == [0, 1, 2, 3]
    assert k.flatten().tolist() == [100, 101]
    assert v.flatten().tolist() == [200, 201]


def test_an_unknown_parameter_is_named() -> None:
    with pytest.raises(ValueError, match="decoder.layers.0.mlp.shared_experts.gate_weight"):
        find_rule("decoder.layers.0.mlp.shared_experts.gate_weight")


def test_missing_and_torn_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no .safetensors file"):
        HfTensors(tmp_path)
    save_file({"a": torch.zeros(4)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="no tensor 'model.norm.weight'"):
        HfTensors(tmp_path)["model.norm.weight"]
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-8])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a complete safetensors file"):
        HfTensors(tmp_path)


def test_a_folder_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", vocab_size=33)
    tensors = load_file(source / "model.safetensors")
    write_hf_folder(tensors.items(), source, tmp_path / "copy")
    assert {p.name for p in (tmp_path / "copy").iterdir()} >= {
        "config.json",
        "model.safetensors",
        "generation_config.json",
    }
    again = load_file(tmp_path / "copy" / "model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())

    with pytest.raises(ValueError, match="never overwrites"):
        write_hf_folder(tensors.items(), source, tmp_path / "copy")

    def broken():
        yield "model.norm.weight", torch.zeros(2)
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        write_hf_folder(broken(), source, tmp_path / "half")
    tensors["model.norm.weight"][3], tensors["lm_head.weight"][0, 0] = float("inf"), float("nan")
    read = []
    stream = (read.append(name) or (name, tensor) for name, tensor in tensors.items())
    with pytest.raises(ValueError, match=r"NaN or inf in lm_head\.weight \(and 1 more\)"):
        write_hf_folder(stream, source, tmp_path / "half")
    assert len(read) == len(tensors)  # the other ranks of a run wait for the stream's end
    assert [p.name for p in tmp_path.iterdir() if "half" in p.name] == []


def test_large_models_are_written_in_parts(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("nemo_flashrl.weight_sync.hf_writer.MAX_SHARD_BYTES", 40_000)
    source = write_model(tmp_path / "source", vocab_size=33)
    tensors = load_file(source / "model.safetensors")
    write_hf_folder(tensors.items(), source, tmp_path / "parts")
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in tensors.values())
    assert len(set(index["weight_map"].values())) > 2
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "parts").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_the_index_says_which_copy_is_read(tmp_path: Path) -> None:
    """`a` is in both shards, 1 in the first and 2 in the second; transformers reads a model.safetensors before both."""
    first, second = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))

    def write(file: str, **values: float) -> None:
        save_file({name: torch.tensor([value]) for name, value in values.items()}, tmp_path / file)

    def read(file: str, **more: str) -> HfTensors:
        weight_map = {"a": file, "b": first, "c": second, **more}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return HfTensors(tmp_path)

    write(first, a=1, b=3)
    write(second, a=2, c=4)
    assert {name: t.tolist() for name, t in read(second).items()} == {"a": [2], "b": [3], "c": [4]}
    assert f"'a' of {first} differs from that of {second}, which" in read(second).conflict()
    assert read(first)["a"].tolist() == [1]
    assert f"'a' of {second} differs from that of {first}, which" in read(first).conflict()
    with pytest.raises(ValueError, match=f"{second} lacks 'd', which"):
        read(first, d=second)
    write(second, a=1, c=4)
    write("model.safetensors", a=1, b=2)
    assert read(first)["b"].tolist() == [3]
    assert f"'b' of model.safetensors differs from that of {first}, which" in read(first).conflict()
    write("model.safetensors", a=1, b=3)
    assert read(first).conflict() == ""  # copies that are equal harm nobody


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_umask_says_who_may_read(tmp_path: Path, mask: int, mode: int) -> None:
    """A rollout server may be another user's."""
    before = os.umask(mask)
    try:
        source = write_model(tmp_path / "source", vocab_size=33)
        write_hf_folder(load_file(source / "model.safetensors").items(), source, tmp_path / "export")
        factors = {"m.v_proj.lora_A.weight": torch.ones(2, 4), "m.v_proj.lora_B.weight": torch.ones(4, 2)}
        with new_folder(tmp_path / "adapter") as folder:
            write_peft(factors, folder)
        home = WeightsHome(tmp_path)
        asyncio.run(write_folder(factors.items(), home.folder / "sync-1"))
        written = [tmp_path / "export", tmp_path / "adapter", home.folder, home.folder / "sync-1"]
    finally:
        os.umask(before)
    files = [file for folder in written for file in folder.glob("*.safetensors")]
    assert len(files) == 3
    assert {file.stat().st_mode & 0o777 for file in files} == {mode}
    assert {folder.stat().st_mode & 0o777 for folder in written} == {0o777 & ~mask}
    home.remove()
