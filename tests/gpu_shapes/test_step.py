"""A whole optimizer step of every shipped experiment's own model and layout on fake CUDA, of one rank of a stage.

Widths, vocabulary, tokens and parallel sizes are the experiment's. Layers are fewer, two or four a stage: the plan and
the step are both linear in them, and what is no layer's is a larger part of the whole.
"""

from __future__ import annotations

import pytest
from gpu_sizes import PLAN_TOLERANCE, over_budget
from paths import ROOT
from stand_in_process import StandInProcess

from nemo_flashrl import config

CASES = {  # experiment, pipeline stage, layers, launches at most, overrides
    "8b": ("llama3_8b_32k", 0, 4, 1590, []),
    "8b padded": ("llama3_8b_32k", 0, 2, 1380, ["batching.layout=padded"]),
    "8b context": ("llama3_8b_32k", 0, 2, 1030, ["parallel.context=2"]),
    "8b lora": ("llama3_8b_32k", 0, 2, 1590, ["lora.rank=16"]),
    "8b grpo": ("llama3_8b_32k", 0, 2, 1550, ["algorithm=grpo"]),
    "8b ungated": (
        "llama3_8b_32k",
        0,
        2,
        1520,
        ["algorithm.settings.delta=inf", "+algorithm.settings.ratio_guard=inf"],
    ),
    "8b one gpu": ("llama3_8b_32k_one_gpu", 0, 2, 2020, []),
    "8b kept": ("llama3_8b_32k", 0, 2, 1310, ["model.recompute=none"]),
    "70b first stage": ("llama3_70b", 0, 8, 550, []),
    "70b second stage": ("llama3_70b", 1, 8, 500, []),
    "70b third stage": ("llama3_70b", 2, 8, 500, []),
    "70b last stage": ("llama3_70b", 3, 8, 1970, []),
    "qwen2 7b": ("alfworld_50_turns", 0, 2, 1600, []),
    "qwen2 7b tools": ("python_tool_qwen2_5_7b", 0, 2, 1360, []),
    "qwen2 1.5b": ("math_qwen2_5_1_5b", 0, 4, 1450, []),
    "r1 1.5b": ("math_r1_distill_1_5b", 0, 2, 1450, []),
    "qwen3 4b": ("python_tool_qwen3_20_turns", 0, 2, 1450, []),
    "mixtral": (
        "llama3_8b_32k",
        0,
        2,
        1360,
        ["model=mixtral_8x7b", "model.context_length=8192", "batching.max_tokens_per_microbatch=8192"],
    ),
    "qwen3 experts": (
        "llama3_8b_32k",
        0,
        2,
        2860,
        ["model=qwen3_30b_a3b", "parallel.expert=8", "model.recompute=none"],
    ),
}


@pytest.fixture(scope="module", params=CASES)
def step(request: pytest.FixtureRequest, fake_gpu: StandInProcess) -> dict:
    experiment, stage, layers, launches, overrides = CASES[request.param]
    options = {"stage": stage, "layers": layers, "overrides": overrides}
    found = fake_gpu.run("gpu_step", experiment=experiment, **options, with_callbacks=request.param == "8b")
    return found | {"most_launches": launches}


def test_the_plan_is_what_a_step_holds(step: dict) -> None:
    """Weights, gradients and optimizer to 0.1%, and the most of a step; no device mismatch, no assertion of a layer."""
    plan = step["plan"]
    standing = plan["weights"] + plan["gradients"] + plan["optimizer"]
    assert step["static"] == pytest.approx(standing, rel=1e-3)
    assert step["peak"] == pytest.approx(plan["device"], rel=PLAN_TOLERANCE)
    # What stands hides nothing: the rest by itself.
    assert step["peak"] - step["static"] == pytest.approx(plan["device"] - standing, rel=0.1)
    assert step["made_in"] == ["torch.bfloat16"]
    assert step["host_optimizer"] == plan["host_optimizer"]


def test_experts_are_multiplied_together_and_one_rank_gathers_the_optimizer(step: dict) -> None:
    assert step["experts"] == ["TEGroupedMLP"] * step["layers_with_experts"]
    assert step["metadata"]["distrib_optim_fully_reshardable_mem_efficient"]


def test_the_host_waits_and_launches_no_more_than_the_budget(step: dict) -> None:
    assert not over_budget(step["syncs"], step["microbatches"])
    assert step["launches"] <= step["most_launches"]


def test_every_experiment_with_a_model_has_a_case() -> None:
    """The others leave model and GPUs to the user."""
    names = {path.stem for path in (ROOT / "conf/experiment").glob("*.yaml")}
    loaded = {name: config.load(name, [], unneeded=("output", "model.path")) for name in names}
    complete = {name for name, run in loaded.items() if run.model.hf_config and run.cluster.gpus_per_node}
    assert complete == {experiment for experiment, *_ in CASES.values()}


@pytest.mark.parametrize("step", ["8b"], indirect=True)
def test_callbacks_around_a_step(step: dict) -> None:
    """Launches, waits and memory of what runs beside it; 8B at two layers of 32, on one of four tensor ranks."""
    around = {name: dict(zip(("launches", "syncs", "bytes"), n, strict=True)) for name, n in step["around"].items()}
    pieces = step["parameters"] / 2**23
    # Some ten launches a piece: 6 us each against 0.6 ms on the bus, and 12 bytes a number in flight.
    for name in ("reference follows", "reference swap"):
        assert around[name]["launches"] < 30 * (pieces + 60), name
        assert around[name]["bytes"] <= 2 * 12 * 2**23, name
    assert around["reference follows"]["syncs"] == 0
    assert around["reference swap"]["syncs"] <= 2
    assert around["refit stream"]["syncs"] == 0
    # Whatever the number of microbatches; in a pass over one the head looks once.
    assert around["KL in the reward"]["syncs"] == around["reference means"]["syncs"] == 1
    assert around["score"]["syncs"] == 1
    assert around["first states"]["syncs"] == 1 + 1
    assert around["pass agreement"]["syncs"] == 2 * 1 + 1
