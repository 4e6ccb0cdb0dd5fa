"""Every shipped configuration loads, and those of a cluster fit its GPUs by the plan's reckoning."""

from __future__ import annotations

import dataclasses

import pytest

from nemo_flashrl.algorithms.grpo import Grpo, GrpoSettings
from nemo_flashrl.cli import main
from nemo_flashrl.config import conf_folder, load, settings_of
from nemo_flashrl.config.schema import PluginConfig

NAMES = sorted(path.stem for path in (conf_folder() / "experiment").glob("*.yaml"))
HERE = ("openenv", "python_tool", "reasoning_gym", "rehearsal", "textworld", "verifiable_math")
ON_GPUS = [name for name in NAMES if name not in HERE]
MODELS = sorted(path.stem for path in (conf_folder() / "model").glob("*.yaml"))

PAPER_DELTAS = {
    "llama3_8b_32k": 1e-3,
    "llama3_70b": 1e-3,
    "python_tool_qwen2_5_7b": 1e-3,
    "python_tool_qwen3_20_turns": 1e-3,
    "math_qwen2_5_1_5b": 3e-3,
    "math_r1_distill_1_5b": 3e-3,
}


def test_the_settings_of_the_paper() -> None:
    """FlashREINFORCE (NVIDIA, September 2026): trajectories a step, turns, delta, share of a failed one's tokens."""
    assert {
        "math_r1_distill_1_5b",
        "math_qwen2_5_1_5b",
        "python_tool_qwen2_5_7b",
        "python_tool_qwen3_20_turns",
        "alfworld_50_turns",
    } <= set(ON_GPUS)
    assert not any(load(name, ["output=x", "model.path=x"]).cluster.gpus_per_node for name in HERE)
    alfworld = load("alfworld_50_turns", ["output=x", "model.path=x"])
    assert (alfworld.rollout.batch_size, alfworld.rollout.max_turns) == (64, 50)
    assert alfworld.algorithm.settings == {"delta": 1e-3, "negative_token_fraction": 0.9}
    for name, delta in PAPER_DELTAS.items():
        assert load(name, ["output=x", "model.path=x"]).algorithm.settings == {"delta": delta}, name


@pytest.mark.parametrize("name", NAMES)
def test_grpo_is_one_choice_away(name: str) -> None:
    """What an experiment sets of FlashREINFORCE goes with it; all else stays."""
    own, grpo = (load(name, ["output=x", "model.path=x", *choice]) for choice in ([], ["algorithm=grpo"]))
    assert grpo.algorithm == PluginConfig("grpo", {"group_size": 8})
    assert settings_of(Grpo, grpo.algorithm.settings, "algorithm") == GrpoSettings(group_size=8)
    assert own.algorithm.name == "flash_reinforce"
    assert dataclasses.replace(grpo, algorithm=own.algorithm) == own


@pytest.mark.parametrize("name", ON_GPUS)
def test_a_job_fits(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", name]) == 0, capsys.readouterr().out


def test_a_job_that_does_not_fit_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """8B at 32k without recomputation on one GPU: weights, gradients and Adam alone are 8.03e9 x 18 bytes = 135 GiB."""
    refused = main(["plan", "llama3_8b_32k", "model.recompute=none", "parallel.tensor=1", "cluster.gpus_per_node=1"])
    assert refused == 1
    assert "DOES NOT FIT" in capsys.readouterr().out


@pytest.mark.parametrize("name", MODELS)
def test_models_compose_and_can_be_planned(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "rehearsal", f"+model={name}"])
    assert "parameters on" in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_servers_are_one_choice_away(name: str) -> None:
    """`rollout=vllm` changes where actions are sampled and lets episodes go on; the experiment's own sizes stay."""
    base = ["output=x", "model.path=x"]
    own = load(name, base).rollout
    served = load(name, [*base, "rollout=vllm", "rollout.servers=[http://n1:8000]"]).rollout
    assert (own.engine, served.engine, served.servers) == ("transformers", "vllm", ["http://n1:8000"])
    assert (served.mode, served.max_staleness) == ("in_flight", 4)
    same = {"engine": own.engine, "servers": [], "mode": own.mode, "max_staleness": own.max_staleness}
    assert dataclasses.replace(served, **same) == own


@pytest.mark.parametrize("name", sorted(path.stem for path in (conf_folder() / "rollout").glob("*.yaml")))
def test_rollouts_compose(name: str) -> None:
    rollout = load("rehearsal", ["output=x", "model.path=x", f"rollout={name}"]).rollout
    assert rollout.engine == {"streaming": "transformers"}.get(name, name)
    assert (rollout.mode == "sync") == (name == "transformers")


@pytest.mark.parametrize("name", sorted(path.stem for path in (conf_folder() / "cluster").glob("*.yaml")))
def test_clusters_compose(name: str) -> None:
    cluster = load("rehearsal", ["output=x", "model.path=x", f"+cluster={name}"]).cluster
    assert (cluster.gpus_per_node > 0) == (name != "cpu")
    assert cluster.environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == (None if name == "cpu" else "1")
