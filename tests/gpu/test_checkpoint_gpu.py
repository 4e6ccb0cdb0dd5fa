"""A checkpoint on a GPU, weights and the distributed optimizer's state."""

from __future__ import annotations

from gpu_checks import Check
from gpu_sizes import FAKE_LAYERS, SAVED_LAYERS, STEPS


def test_another_model_takes_every_bit(gpu: Check) -> None:
    experiment, overrides, _ = STEPS["1b"]
    layers = SAVED_LAYERS if gpu.is_real else FAKE_LAYERS
    found = gpu.run("check_checkpoint", "checkpoint", experiment=experiment, overrides=overrides, layers=layers)
    assert found["tensors"] > 0
    if gpu.is_real:
        assert found["differed_before"]
        assert not found["differ"]
