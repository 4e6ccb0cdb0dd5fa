"""Checkpoints of the distributed optimizer over Transformer Engine's layers, saved by NeMo on two ranks and resumed."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from plain import worst_error
from stand_in_process import StandInProcess
from tiny import random_trajectories, write_model

VOCAB_SIZE = 131
TENSOR = ["parallel.tensor=2", "parallel.sequence=true"]
GATE_AND_UP = 2 * 2 * 96 * 64 // 2  # of the MLPs of both layers, on one of two tensor ranks
COMMON = ["trainer.steps=2", "optimizer.warmup_steps=0", "batching.max_tokens_per_microbatch=100"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distributed_optimizer")
    write_model(folder / "model", "qwen2", vocab_size=VOCAB_SIZE)
    (folder / "batch.pkl").write_bytes(pickle.dumps(random_trajectories(6, VOCAB_SIZE)))
    return folder


def train(stand_in: StandInProcess, folder: Path, name: str, overrides: list[str], **options) -> dict:
    out = str(folder / f"{name}.pt")
    told = stand_in.run(
        "te_training",
        ranks=2,
        folder=str(folder / "model"),
        trajectories=str(folder / "batch.pkl"),
        out=out,
        vocab_size=VOCAB_SIZE,
        overrides=[*COMMON, *overrides],
        **options,
    )
    assert told["layers"] == "TELayerNormColumnParallelLinear"
    return told | torch.load(out)


def saved_run(stand_in: StandInProcess, folder: Path, name: str, overrides: list[str]) -> dict:
    """Two steps, saved after the first."""
    saved = str(folder / f"{name}.saved")
    return train(stand_in, folder, name, overrides, save=saved) | {"saved": saved, "overrides": overrides}


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def straight(request, stand_in: StandInProcess, folder: Path) -> dict:
    """Of two data-parallel ranks."""
    return saved_run(stand_in, folder, request.param, [f"model.precision={request.param}"])


def assert_same(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys() == {"weights", "param", "exp_avg", "exp_avg_sq"}
    for kind, tensors in expected.items():
        assert found[kind].keys() == tensors.keys()
        assert all(torch.equal(found[kind][name], tensor) for name, tensor in tensors.items()), kind


def near(found: int, count: int) -> bool:
    """With the padding of a buffer."""
    return count <= found < 1.008 * count


def assert_next_step_is_near(resumed: dict, straight: dict) -> None:
    (first, second), (step,) = straight["steps"], resumed["steps"]
    assert worst_error(step["exp_avg"], second["exp_avg"]) < (1e-5,)
    # Adam's second step is nearly the gradient's sign: entries near 0 may differ.
    moved = [{name: s["param"][name] - first["param"][name] for name in first["param"]} for s in (step, second)]
    assert worst_error(*moved) < (1e-2,)


@pytest.mark.parametrize("straight", ["bf16"], indirect=True)
def test_resumed_at_the_same_sizes_bit_for_bit(stand_in, folder, straight) -> None:
    first, second = straight["steps"]
    resumed = train(stand_in, folder, "same", straight["overrides"], resume=straight["saved"])
    assert_same(resumed["begun"], first)
    (step,) = resumed["steps"]
    assert_same(step, second)
    assert not torch.equal(*(s["exp_avg"]["model.norm.weight"] for s in (first, second)))
    # What each rank reads into, the whole of what both share, and as much again of what they exchange.
    assert all(near(read, 24 * straight["parameters"]) for read in resumed["read"])


def test_resumed_on_two_tensor_ranks(stand_in, folder, straight) -> None:
    """Weights, fp32 weights and moments bit for bit; what follows by the rounding of products that are cut."""
    resumed = train(stand_in, folder, "tensor", [*straight["overrides"], *TENSOR], resume=straight["saved"])
    assert_same(resumed["begun"], straight["steps"][0])
    # Nobody shares it; gate and up projections are put together again.
    assert all(near(read, 12 * (resumed["parameters"] + GATE_AND_UP)) for read in resumed["read"])
    if straight["overrides"] == ["model.precision=fp32"]:
        assert_next_step_is_near(resumed, straight)


def test_two_tensor_ranks_resumed_as_data_parallel_ones(stand_in, folder) -> None:
    precision = ["model.precision=fp32"]
    straight = saved_run(stand_in, folder, "of_tensor_ranks", [*precision, *TENSOR])
    resumed = train(stand_in, folder, "data", precision, resume=straight["saved"])
    assert_same(resumed["begun"], straight["steps"][0])
    assert_next_step_is_near(resumed, straight)


def test_one_rank_gathers_the_optimizer(straight) -> None:
    """Weight and two moments in fp32, padding of the buffer included; by Megatron's default each rank gathers them."""
    assert straight["metadata"]["distrib_optim_fully_reshardable_mem_efficient"]
    (first, by_default), (second, of_second) = straight["gathered"]
    assert near(first["received"], 12 * straight["parameters"])
    assert near(first["copied"], 12 * straight["parameters"])  # by what writes it, from the buffers that it was put in
    assert second["received"] == second["copied"] == 0 and first["sent"] == second["sent"] == first["received"] / 2
    assert by_default["received"] == of_second["received"] == first["received"]
