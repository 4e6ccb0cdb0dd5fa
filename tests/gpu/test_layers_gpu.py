"""Transformer Engine's layers on a GPU, in bf16; distances in what the product allows between two passes."""

from __future__ import annotations

from gpu_checks import Check
from gpu_sizes import FAKE_LAYERS, LAYERS, QUICK_LAYERS_LENGTHS


def sizes(gpu: Check) -> dict:
    quick = {"lengths": QUICK_LAYERS_LENGTHS} if gpu.is_quick else {}
    return LAYERS | quick | ({} if gpu.is_real else {"layers": FAKE_LAYERS})


def test_packed_rows_say_what_padded_ones_say(gpu: Check) -> None:
    found = gpu.run("check_layers", "attention", part="attention", **sizes(gpu))
    assert found["layer"] == "TEDotProductAttention"
    if gpu.is_real:
        assert found["packed_against_padded"] <= 1 < found["as_one_trajectory"]
        assert found["training_against_no_grad"] <= 1


def test_experts_say_together_what_they_say_one_by_one(gpu: Check) -> None:
    found = gpu.run("check_layers", "experts", part="experts", **sizes(gpu))
    assert found["classes"] == {"together": "TEGroupedMLP", "one by one": "SequentialMLP"}
    if gpu.is_real:
        assert found["together_against_one_by_one"] <= 1
