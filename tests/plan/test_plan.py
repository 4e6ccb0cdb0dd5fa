"""The plan against what the CPU stack allocates, and as a person asks for it."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import run_ranks
from published_models import LLAMA_8B, LLAMA_70B, QWEN3_30B_A3B
from tiny import random_trajectories, write_model

from nemo_flashrl.cli import main
from nemo_flashrl.config import load
from nemo_flashrl.plan.devices import DEVICES
from nemo_flashrl.plan.fitting import disk_use, fits, largest_context, smallest_allocation, stages
from nemo_flashrl.plan.memory import Layout, stage_memory
from nemo_flashrl.plan.page import disk_line
from nemo_flashrl.plan.step_time import decode_tokens_per_second, key_value_cache, step_time
from nemo_flashrl.preflight.admission import report_disk
from nemo_flashrl.weights.model_shape import model_shape

CASES = {  # family, processes, the run's overrides, the plan's layout
    "qwen2": ("qwen2", 1, [], {}),
    "qwen3 recomputed": ("qwen3", 1, ["model.recompute=full"], {"recompute": "full"}),
    "llama selective": ("llama", 1, ["model.recompute=selective"], {"recompute": "selective"}),
    "llama tp2 sequence": (
        "llama",
        2,
        ["parallel.tensor=2", "parallel.sequence=true"],
        {"tensor": 2, "sequence": True},
    ),
    "qwen2 pp2": ("qwen2", 2, ["parallel.pipeline=2"], {"pipeline": 2}),
    "mixtral": ("mixtral", 1, [], {}),
    "qwen3 experts spread": (
        "qwen3_moe",
        2,
        ["parallel.expert=2", "parallel.tensor=2", "parallel.sequence=true"],
        {"expert": 2, "tensor": 2, "sequence": True},
    ),
    "llama lora pp2": ("llama", 2, ["parallel.pipeline=2", "lora.rank=4"], {"pipeline": 2, "lora_rank": 4}),
    "qwen2 lora tp2 sequence": (
        "qwen2",
        2,
        [
            *["parallel.tensor=2", "parallel.sequence=true"],
            *["lora.rank=4", "lora.targets=[linear_qkv,linear_fc2]"],
        ],
        {"tensor": 2, "sequence": True, "lora_rank": 4, "lora_targets": ("linear_qkv", "linear_fc2")},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_plan_is_what_a_cpu_allocates(case: str, tmp_path: Path) -> None:
    """Parameters, gradients, optimizer and reference to the byte; what autograd saves within 5%, of all ranks together
    as experts are not chosen equally."""
    family, processes, overrides, layout = CASES[case]
    folder = write_model(tmp_path / "model", family)
    (tmp_path / "batch.pkl").write_bytes(pickle.dumps(random_trajectories(12, 515)))
    run_ranks(processes, "allocations", folder, tmp_path / "batch.pkl", tmp_path / "out.json", 515, *overrides)
    shape = model_shape(json.loads((folder / "config.json").read_text()))
    options = {"sequence": False, "precision": "fp32", "distributed_optimizer": False, "microbatches": 1} | layout
    plan = Layout(fused_kernels=False, reference="ema", **options)
    kept = measured = 0
    for rank in range(processes):
        found = json.loads((tmp_path / f"out.{rank}").read_text())
        stage = stage_memory(shape, plan, rank * plan.pipeline // processes, found["tokens"])
        for name in ("weights", "gradients", "optimizer", "host_reference"):
            assert getattr(stage, name) == found[name], name
        measured += found["activations"]
        if plan.recompute == "full":  # the layer that is computed again is not alive when the forward pass has ended
            kept += found["tokens"] * (shape.layers * 4 * shape.hidden + 8 + 8 * shape.hidden + 4)
            assert stage.activations > 2 * kept
        else:
            kept += stage.activations
    assert kept == pytest.approx(measured, rel=0.05)


def test_recomputation_and_parallel_sizes_save_what_they_should() -> None:
    shape, tokens = model_shape(LLAMA_8B), 32768
    plain = stages(shape, Layout(), tokens)[0]
    full = stages(shape, Layout(recompute="full"), tokens)[0]
    halves = stages(shape, Layout(tensor=2), tokens)[0]
    context = stages(shape, Layout(context=2), tokens)[0]
    assert full.activations < plain.activations / 10
    assert halves.activations == pytest.approx(plain.activations / 2, rel=0.01)
    assert context.activations == pytest.approx(plain.activations / 2, rel=0.01)
    first, *_, last = stages(shape, Layout(pipeline=4), tokens)
    assert first.activations == pytest.approx(4 * last.activations, rel=0.02)  # four microbatches in flight against one
    assert first.head == 0 < last.head
    assert stages(shape, Layout(reference="ema"), tokens)[0].host_reference == 4 * shape.parameters


def test_largest_context_is_the_edge() -> None:
    shape, device = model_shape(LLAMA_8B), DEVICES["H800"]
    layout = Layout(tensor=4, data=2, recompute="full")
    longest = largest_context(shape, layout, device)
    assert longest >= 65536
    assert fits(shape, layout, device, longest)
    assert not fits(shape, layout, device, longest + 1024)


def test_largest_context_is_one_that_a_run_accepts(tmp_path: Path, capsys) -> None:
    """Spread over eight GPUs the model would fit far more than its positions."""
    device = DEVICES["H800"]
    for positions in (32768, 1000):
        shape = model_shape({**LLAMA_8B, "max_position_embeddings": positions})
        assert largest_context(shape, Layout(tensor=8, recompute="full"), device) == positions
    bounded = model_shape({**LLAMA_8B, "max_position_embeddings": 2**22})
    free = model_shape({**LLAMA_8B, "max_position_embeddings": None})
    layout = Layout(tensor=4, recompute="full")
    assert largest_context(bounded, layout, device) == largest_context(free, layout, device) < 2**22
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, "max_position_embeddings": 8192}))
    assert main(["plan", str(tmp_path), "--tp", "8", "--recompute", "full"]) == 0
    page = capsys.readouterr().out
    assert "microbatches of 8192 tokens" in page  # the default of 32768 is none for this model
    assert "largest context, one trajectory per microbatch: 8192 tokens (the model's max_position_embeddings)" in page
    assert main(["plan", str(tmp_path), "--context", "8193"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("flashrl plan: context=8193: the model's max_position_embeddings is 8192")


def test_a_small_model_decodes_no_faster_than_its_engine_steps() -> None:
    """512 episodes in steps of 5 ms and 24 x 10 kernels of 3 us: the weights alone would be read in 0.5 ms."""
    small = {"model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24}
    small |= {"num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 32000}
    shape, device = model_shape(small), DEVICES["H100"]
    speed, episodes = decode_tokens_per_second(shape, device, context_tokens=1024)
    assert episodes == 512
    reading = (2 * shape.parameters + 512 * key_value_cache(shape, 512)) / (3350e9 * 0.6)
    computing = 2 * (shape.active_matrix_parameters + 1024 * 32000) * 512 / (989e12 * 0.4)
    assert speed == pytest.approx(512 / (max(reading, computing) + 5e-3 + 720e-6))
    assert speed < 512 / 5.72e-3
    large, episodes = decode_tokens_per_second(model_shape(LLAMA_8B), device, context_tokens=32768)
    bytes_read = 2 * 8_030_261_248 + episodes * key_value_cache(model_shape(LLAMA_8B), 16384)
    assert large == pytest.approx(episodes / (bytes_read / (3350e9 * 0.6) + 5e-3 + 32 * 30e-6))  # bound by bandwidth


def test_smallest_allocation() -> None:
    shape, device = model_shape(LLAMA_8B), DEVICES["H800"]
    found = smallest_allocation(shape, Layout(), device, 8192)
    assert fits(shape, found, device, 8192)
    assert (found.ranks, found.tensor) == (2, 2)  # 18 bytes x 8e9 are 135 GiB of 2 x 73
    assert smallest_allocation(model_shape(LLAMA_70B), Layout(), device, 32768).ranks >= 16  # 1183 GiB / 73
    assert smallest_allocation(model_shape(LLAMA_70B), Layout(), device, 2**30) is None
    found = smallest_allocation(model_shape(QWEN3_30B_A3B), Layout(), device, 32768)
    assert (found.ranks, found.expert) == (8, 8)  # on four, weights and gradients alone are 46 GiB of 73
    found = smallest_allocation(model_shape(LLAMA_8B), Layout(lora_rank=16), device, 8192)
    assert (found.ranks, found.recompute) == (1, "none")


def test_time_of_a_step() -> None:
    """6 N D for the matrices of the trunk: 8B less two embeddings, 1e6 tokens."""
    shape, device = model_shape(LLAMA_8B), DEVICES["H100"]
    time = step_time(shape, Layout(data=8), device, tokens=1e6, trajectory_tokens=0)
    assert time.trunk == pytest.approx(6 * (8_030_261_248 - 2 * 128256 * 4096) * 1e6, rel=1e-3)
    assert time.head == 8 * 4096 * 128256 * 1e6
    assert time.seconds == pytest.approx(time.total / (8 * 989e12 * 0.4))
    again = step_time(shape, Layout(data=8, recompute="full"), device, tokens=1e6, trajectory_tokens=0)
    assert again.recompute == pytest.approx(time.trunk / 3)


def test_the_page(tmp_path: Path, capsys) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    sizes = ["--device", "h800", "--gpus", "16", "--tp", "4", "--pp", "2", "--recompute", "full", "--reference", "ema"]
    assert main(["plan", str(tmp_path), *sizes]) == 0
    page = capsys.readouterr().out
    assert "8.03B parameters on 16 x h800: TP 4, PP 2, CP 1, DP 2" in page
    assert "stage 1" in page
    assert "fewest GPUs for a context of 32768: 4 (1 node)" in page
    turns, cores = re.search(
        r"rollout workers: (\d+) turns/s at 20 turns a trajectory; cores that keep up: (\d+)", page
    ).groups()
    seconds = int(re.search(r"about (\d+) s at 40% of peak", page)[1])
    assert abs(int(turns) - 64 * 20 / seconds) < 1 and int(cores) == 1  # at 1 ms a turn and 70% of a core
    assert main(["plan", str(tmp_path), "--context", "32768"]) == 1  # one GPU
    assert "DOES NOT FIT" in capsys.readouterr().out
    refused = (
        (["--tp", "3"], "tensor=3"),
        (["--device", "TPU"], "'TPU'"),
        (["--gpus", "3", "--tp", "2"], "3 GPUs (cluster.nodes x cluster.gpus_per_node, or --gpus)"),
        (["--ep", "2"], "expert=2"),
    )
    for wrong, words in refused:
        assert main(["plan", str(tmp_path), *wrong]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line


def test_what_a_run_writes() -> None:
    """8.03e9 parameters: 14 bytes each in bf16 with moments and fp32 weights, 12 in fp32, 4 for an average."""
    shape = model_shape(LLAMA_8B)
    run = disk_use(shape, Layout(), written=2, keep=2)
    assert (run.checkpoint, run.checkpoints) == (14 * 8_030_261_248, 2)
    assert run.total == 2 * 14 * 8_030_261_248 + 2 * 8_030_261_248
    assert disk_use(shape, Layout(), written=9, keep=2).checkpoints == 3  # the third is written before the first goes
    averaged = disk_use(shape, Layout(precision="fp32", reference="ema"), written=1, keep=2, exports=2)
    assert (averaged.checkpoint, averaged.export) == (16 * 8_030_261_248, 2 * 4 * 8_030_261_248)
    adapter = disk_use(shape, Layout(lora_rank=8, lora_targets=("linear_proj",)), written=1, keep=1)
    assert adapter.checkpoint == 2 * 8_030_261_248 + 14 * 32 * 8 * (4096 + 4096)
    assert disk_line(run) == (
        "disk: up to 2 checkpoints of 112.4 GB and 16.1 GB of exported weights, 240.9 GB in all, metrics not included"
    )


def test_a_run_that_the_disk_cannot_hold_is_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    config = load("rehearsal", [f"output={tmp_path / 'run'}", "model.path=x", "model.precision=bf16"])
    free = 3 * 14 * 8_030_261_248 + 2 * 8_030_261_248  # 120 steps, saved every 50: three checkpoints
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    report_disk(config, LLAMA_8B)
    assert "353.3 GB in all, metrics not included; 353.3 GB free for output=" in capsys.readouterr().err
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free - 1))
    with pytest.raises(ValueError, match=r"353.3 GB in all.* free some, lower checkpoint.keep \(2\)"):
        report_disk(config, LLAMA_8B)
    (tmp_path / "run/checkpoints/step=50").mkdir(parents=True)
    (tmp_path / "run/checkpoints/step=50/part").write_bytes(b"x")  # of this run: a checkpoint that is there
    report_disk(config, LLAMA_8B)


def test_a_configuration_with_a_model_of_its_own(tmp_path: Path, capsys) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA_8B))
    run = "model: {path: %s, context_length: 8192}\nenvironment: {name: key_value_store}\nparallel: {tensor: 4}\n"
    (tmp_path / "run.yaml").write_text("algorithm: {name: grpo}\n" + run % (tmp_path / "model"))
    assert main(["plan", str(tmp_path / "run.yaml"), "cluster.device=H200"]) == 0
    assert "8.03B parameters on 4 x H200: TP 4" in capsys.readouterr().out
    (tmp_path / "model" / "config.json").write_text("{\n'no JSON'}")
    for model in (tmp_path / "run.yaml", tmp_path / "model"):
        assert main(["plan", str(model)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{tmp_path}/model/config.json is not JSON (Expecting" in line
