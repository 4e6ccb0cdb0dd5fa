"""NeMo-Run's way in: what the recipes and the executor say, and that NeMo-Run finds them."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

run = pytest.importorskip("nemo_run")

from nemo_flashrl import recipes  # noqa: E402

LONG = ["model.context_length=131072", "batching.max_tokens_per_microbatch=131072"]


def test_training_is_a_partial(tmp_path: Path) -> None:
    overrides = [f"output={tmp_path}", "model.path=/m", "trainer.steps=3"]
    recipe = recipes.training("llama3_70b", overrides)
    assert isinstance(recipe, run.Partial)
    assert recipe.__fn_or_cls__ is recipes.train
    assert (recipe.config, recipe.overrides) == ("llama3_70b", overrides)


def test_a_misspelt_key_is_refused_before_anything_is_submitted() -> None:
    with pytest.raises(ValueError, match=r"trainer\.stps"):
        recipes.training("rehearsal", ["output=x", "model.path=x", "trainer.stps=3"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["parallel.tensor=3"], r"parallel\.tensor=3 x .* does not divide the 8 processes"),
        (["parallel.tensor=8", "model.hf_config.num_key_value_heads=4"], r"tensor=8: .* the model's 4 key/value heads"),
        (["rollout.batch_size=1", "rollout.max_in_flight=1"], r"batch_size=1: leaves some of the 2 data-parallel"),
        ([*LONG, "model.recompute=none"], r"model\.context_length=131072: does not fit a H800 .*; \d+ tokens do"),
        ([*LONG, "model.context_length=32768", "model.recompute=none"], r"max_tokens_per_microbatch=131072: .*"),
    ],
)
def test_what_cannot_run_or_fit_is_not_submitted(overrides: list[str], words: str) -> None:
    needed = ["output=x", "model.path=x"]
    recipes.training("llama3_8b_32k", needed)
    with pytest.raises(ValueError, match=words):
        recipes.training("llama3_8b_32k", [*needed, *overrides])


def test_the_executor_has_the_configurations_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NEMORUN_HOME", str(tmp_path))
    executor = recipes.slurm_executor(
        "llama3_70b",
        account="team",
        partition="gpu",
        container_image="nemo-flashrl",
        overrides=["output=x", "model.path=x"],
        mem="0",
    )
    assert (executor.nodes, executor.ntasks_per_node, executor.gpus_per_node) == (4, 8, 8)
    assert (executor.account, executor.partition, executor.mem) == ("team", "gpu", "0")
    assert executor.env_vars["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert type(executor.packager) is run.Packager  # NeMo-Run's own default asks for a git checkout
    assert executor.tunnel.job_dir == str(tmp_path / "experiments")


def test_without_gpus_it_asks_for_none() -> None:
    executor = recipes.slurm_executor("rehearsal", account="a", overrides=["output=x", "model.path=x"])
    assert (executor.nodes, executor.ntasks_per_node, executor.gpus_per_node) == (1, 1, None)


def test_the_command_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """`nemo flashrl train ...`: the entry point names this module, and its command keeps our exit code."""
    (entry,) = (e for e in importlib.metadata.entry_points(group="nemo_run.cli") if e.name == "flashrl")
    assert entry.load() is recipes
    asked = []
    monkeypatch.setattr(recipes.cli, "main", lambda arguments: asked.append(arguments) or 2)
    with pytest.raises(SystemExit) as stop:
        recipes.train("my.yaml", ["trainer.steps=1"])
    assert stop.value.code == 2
    assert asked == [("train", "my.yaml", "trainer.steps=1")]
