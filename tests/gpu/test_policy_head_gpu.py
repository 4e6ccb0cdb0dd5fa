"""The policy head on a GPU: precision, its kernels, and its time and memory beside other definitions of it."""

from __future__ import annotations

import pytest
from gpu_checks import Check
from gpu_sizes import (
    FAKE_HEAD_EXACT,
    FAKE_HEAD_SPEED,
    HEAD_EXACT,
    HEAD_FLOORS,
    HEAD_SPEED,
    HEAD_SYNCS,
    PLAN_TOLERANCE,
    QUICK_HEAD_SPEED,
)


def exact_sizes(gpu: Check) -> dict[str, int]:
    return HEAD_EXACT if gpu.is_real else FAKE_HEAD_EXACT


CASES = [(way, dtype) for dtype in ("bfloat16", "float32") for way in ("one pass", "gated")]


@pytest.mark.parametrize(("way", "dtype"), CASES)
def test_no_further_from_float64_than_the_naive_path(gpu: Check, way: str, dtype: str) -> None:
    found = gpu.run("check_head", "exactness", part="exactness", way=way, dtype=dtype, **exact_sizes(gpu))
    if gpu.is_real:
        least = 1e-5 if dtype == "float32" else 0.0  # sums of chunks are in another order
        for name, ours in found["ours"].items():
            assert ours <= max(1.05 * found["naive"][name], least), name


@pytest.mark.parametrize("entropy", [False, True], ids=["", "entropy"])
@pytest.mark.parametrize("columns", [16032, 5003])
def test_triton_kernels_are_plain_torch(gpu: Check, columns: int, entropy: bool) -> None:
    """Rows enough to be tuned."""
    found = gpu.run("check_head", "kernels", part="kernels", rows=1000, columns=columns, entropy=entropy)
    if gpu.is_real:
        for dtype, bound in (("torch.float32", 1e-5), ("torch.bfloat16", 2**-8)):
            assert found[dtype]["statistics_beyond_1e-5"] <= 0
            assert found[dtype]["gradient"] <= bound


def test_time_and_memory_beside_other_ways(gpu: Check) -> None:
    """In multiples of the floor, three bare products; memory as `flashrl plan` has it."""
    sizes = QUICK_HEAD_SPEED if gpu.is_quick else HEAD_SPEED
    sizes = sizes if gpu.is_real else FAKE_HEAD_SPEED
    found = gpu.run("check_head", "speed", part="speed", **sizes, rounds=3 if gpu.is_quick else 7)
    for way in ("one pass", "gated"):
        assert found[way]["peak_bytes"] == pytest.approx(found["planned"][way], rel=PLAN_TOLERANCE), way
    if gpu.is_real:
        times = {name: entry["ms"] for name, entry in found.items() if isinstance(entry, dict) and "ms" in entry}
        assert times["one pass"] <= min(times[name] for name in times.keys() - {"floor", "one pass", "gated"})
        assert times["one pass"] <= HEAD_FLOORS * times["floor"]
        assert times["gated"] <= HEAD_FLOORS * 4 / 3 * times["floor"]  # it forms the product of the logits twice


def test_peak_memory_is_two_gradients_and_a_chunk(gpu: Check) -> None:
    sizes = exact_sizes(gpu)
    found = gpu.run("check_head", "peak", part="peak", **sizes)
    tokens, hidden, vocab, chunk = sizes.values()
    staged = vocab * hidden * (4 + 2) + tokens * hidden * (4 + 2)  # fp32 sums and what autograd is handed, bf16
    assert found["peak_bytes"] <= staged + 3 * chunk * vocab * 4 + 2**24


@pytest.mark.parametrize("way", ["one pass", "gated"])
def test_host_syncs(gpu: Check, way: str) -> None:
    found = gpu.run("check_head", "waits", part="waits", way=way, **exact_sizes(gpu))
    assert sum(count for *_, count in found["syncs"]) <= HEAD_SYNCS[way], found["syncs"]
