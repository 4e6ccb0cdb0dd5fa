"""The policy head of Llama 3 8B on tensor-parallel GPUs, 32k tokens: launches, host syncs, bytes, memory, paper time.

What is counted is the kernels' path, Triton's and apex's, on the oldest torch that has the products; numbers are
those of tests/ops.
"""

from __future__ import annotations

import pytest
from gpu_sizes import HEAD_FLOORS, HEAD_SYNCS, LLAMA3_8B_HEAD, PLAN_TOLERANCE
from stand_in_process import StandInProcess

GATED, ONE_PASS = {"way": "gated"}, {"way": "one pass"}
UNEVEN = {"way": "one pass", "live": 0.5, "spread": 0.1}  # half of the tokens in the mask, 45% to 55% of a shard's
# options, launches, wall time in floors
CASES = {
    "gated": (GATED | {"tensor": 8}, 370, HEAD_FLOORS),
    "one pass": (ONE_PASS | {"tensor": 8}, 360, HEAD_FLOORS),
    "one pass, uneven shards": (UNEVEN | {"tensor": 8}, 280, 1.4),
    "log-probs": ({"way": "logprob", "tensor": 8}, 340, HEAD_FLOORS),
    "one pass, a temperature of each token": (
        ONE_PASS | {"tensor": 8, "per_token_temperature": True},
        420,
        HEAD_FLOORS,
    ),
    "one pass, one GPU": (ONE_PASS | {"tensor": 1}, 1230, HEAD_FLOORS),
}


@pytest.mark.parametrize("case", CASES)
def test_the_head_on_paper(fake_gpu: StandInProcess, case: str) -> None:
    options, launches, floors = CASES[case]
    found = fake_gpu.run("gpu_head", **LLAMA3_8B_HEAD, **options)
    assert found["num_syncs"] == HEAD_SYNCS[options["way"]], found["syncs"]
    assert found["launches"] <= launches
    assert found["ms"] <= floors * found["floor_ms"]
    assert found["bytes_of_walk"] <= 16
    assert found["peak"] == pytest.approx(found["planned"], rel=PLAN_TOLERANCE)


@pytest.mark.parametrize("options", [GATED, UNEVEN], ids=["gated", "one pass"])
def test_no_chunk_waits_for_the_host(fake_gpu: StandInProcess, options: dict) -> None:
    """Four times the chunks, and the same looks: one at the mask, one at what is live behind a gate, one backward."""
    few, many = (fake_gpu.run("gpu_head", **LLAMA3_8B_HEAD, **options, tensor=8, chunk=chunk) for chunk in (4096, 1024))
    assert many["launches"] > 2.5 * few["launches"]
    assert many["syncs"] == few["syncs"]


def test_ranks_exchange_beside_products(fake_gpu: StandInProcess) -> None:
    """Eight chunks, walked twice behind a gate, [with a product launched meanwhile, all].

    Without one are hidden states of each walk's first chunk and of the one that is held, and the last statistics.
    """
    found = fake_gpu.run("gpu_head", **LLAMA3_8B_HEAD, **GATED, tensor=8)["under_products"]
    assert found == {"hidden states": [13, 16], "statistics": [7, 8], "hidden gradients": [8, 8]}


@pytest.mark.parametrize("torch_version", ["2.8", "2.10"])
def test_without_triton_and_apex_it_waits_no_more_often(fake_gpu: StandInProcess, torch_version: str) -> None:
    options = {"tensor": 8, "triton": False, "apex": False, "torch_version": torch_version}
    assert fake_gpu.run("gpu_head", **LLAMA3_8B_HEAD, **GATED, **options)["num_syncs"] == HEAD_SYNCS["gated"]
