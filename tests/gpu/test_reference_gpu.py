"""The reference policy on a GPU: bits, pinned host memory, and what a swap takes of the device."""

from __future__ import annotations

import pytest
from gpu_checks import Check
from gpu_sizes import SWAPPED


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_swap_keeps_every_bit_and_takes_one_piece(gpu: Check, dtype: str) -> None:
    found = gpu.run("check_reference", "swap", dtype=dtype, **SWAPPED)
    layers, width = SWAPPED.values()
    policy_bytes = layers * width**2 * (18 if dtype == "bfloat16" else 16)
    assert found["peak_bytes"] < 4 * width**2 + 0.02 * policy_bytes
    assert found["swap_syncs"] <= 2
    if gpu.is_real:
        assert found["pinned"]
        assert found["differ_within"] < 1e-3
        assert found["policy_bits"] and found["average_bits"]
