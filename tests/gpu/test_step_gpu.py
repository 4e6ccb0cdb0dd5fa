"""A whole optimizer step on a GPU, on one rank: memory against the plan, host syncs against the budget."""

from __future__ import annotations

import pytest
from gpu_checks import Check
from gpu_sizes import FAKE_LAYERS, PLAN_TOLERANCE, QUICK_LAYERS, STEPS


@pytest.mark.parametrize("case", STEPS)
def test_a_step_holds_what_the_plan_says(gpu: Check, case: str) -> None:
    experiment, overrides, layers = STEPS[case]
    most = (QUICK_LAYERS if gpu.is_quick else layers[0]) if gpu.is_real else FAKE_LAYERS
    layers = [min(layers[0], most), *(count for count in layers if count < most)]
    found = gpu.run("check_step", "step", experiment=experiment, overrides=overrides, layers=layers)
    plan = found["plan"]
    assert found["static_bytes"] == pytest.approx(plan["weights"] + plan["gradients"] + plan["optimizer"], rel=0.01)
    assert found["peak_bytes"] == pytest.approx(plan["device"], rel=PLAN_TOLERANCE)
    assert not found["over_budget"]
    if gpu.is_real:
        assert found["finite"] and found["grad_norm"] > 0
