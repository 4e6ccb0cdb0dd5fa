"""The main job: it learns, it is the same twice, and the parallel sizes do not change what it does."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from processes import run_ranks

from nemo_flashrl.metrics.table import find_metric, from_machine
from nemo_flashrl.rehearsal.warm_start import make_warm_start
from nemo_flashrl.run.jsonl import read_metrics


def train(folder: Path, warm_start: Path, processes: int, *overrides: str) -> list[dict]:
    """A few steps of the rehearsal's own configuration; its metrics without times and memory."""
    run_ranks(processes, "training", "rehearsal", f"output={folder}", f"model.path={warm_start}", *overrides)
    return [{k: v for k, v in step.items() if not from_machine(k)} for step in read_metrics(folder / "metrics.jsonl")]


def test_same_seed_twice_is_bit_equal(warm_start: Path, tmp_path: Path) -> None:
    first = train(tmp_path / "a", warm_start, 1, "trainer.steps=4")
    second = train(tmp_path / "b", warm_start, 1, "trainer.steps=4")
    assert first == second
    assert [name for name in first[0] if find_metric(name) is None] == []
    other = train(tmp_path / "c", warm_start, 1, "trainer.steps=4", "trainer.seed=1")
    assert first != other
    weights = [(tmp_path / run / "checkpoint" / "model.safetensors").read_bytes() for run in "abc"]
    assert weights[0] == weights[1] != weights[2]


@pytest.fixture(scope="module")
def alone(warm_start: Path, tmp_path_factory) -> list[dict]:
    return train(tmp_path_factory.mktemp("alone") / "run", warm_start, 1, "trainer.steps=2")


@pytest.mark.parametrize(
    ("processes", "overrides"),
    [
        (4, ["parallel.tensor=2", "parallel.pipeline=2", "batching.max_tokens_per_microbatch=1024"]),
        (2, ["parallel.tensor=2", "parallel.sequence=true"]),
        (2, ["batching.max_tokens_per_microbatch=1000"]),  # data parallel
        (2, ["parallel.context=2", "parallel.overlap_gradients=true"]),
    ],
    ids=["tp2 pp2", "tp2 sequence", "dp2", "cp2"],
)
def test_parallel_sizes_do_not_change_the_run(
    warm_start: Path, alone: list[dict], tmp_path: Path, processes, overrides
) -> None:
    """The first update is the same to rounding; later ones sample other tokens where a draw falls on the edge."""
    together = train(tmp_path / "run", warm_start, processes, "trainer.steps=2", *overrides)
    for name in ("reward_mean", "gate_acceptance", "policy_tokens", "loss", "grad_norm", "ratio_mean"):
        assert together[0][name] == pytest.approx(alone[0][name], rel=1e-4, abs=1e-7), name
    assert together[1]["logprob_difference_max"] < 1e-4  # the refit gave the sampler the trainer's weights


def test_evaluation_leaves_training_alone(warm_start: Path, tmp_path: Path) -> None:
    """Two pipeline stages; the sampler serves the reference in between, and the policy again when training goes on."""
    reference = ("parallel.pipeline=2", "trainer.steps=3", "reference.mode=frozen", "reference.evaluate=true")
    played = ("evaluation.every_steps=2", "evaluation.settings.seed=99", "evaluation.tasks=16", "evaluation.samples=2")
    plain = train(tmp_path / "plain", warm_start, 2, *reference)
    evaluated = train(tmp_path / "evaluated", warm_start, 2, *reference, *played)
    found = [{k: v for k, v in step.items() if "evaluation_" in k} for step in evaluated]
    assert found[0] == {}
    names = ("success", "reward", "pass_at_2", "environment_errors")
    assert {f"{who}evaluation_{what}" for who in ("", "reference_") for what in names} == {*found[1]}
    assert found[1]["evaluation_environment_errors"] == 0
    before = "reference_evaluation_success"
    assert found[1][before] == found[2][before]  # frozen: the same weights, tasks and seeds
    assert [{k: v for k, v in step.items() if k not in found[1]} for step in evaluated] == plain
    seconds = read_metrics(tmp_path / "evaluated" / "metrics.jsonl")[1]
    parts = ("rollout_seconds", "train_seconds", "refit_seconds", "evaluating_seconds")
    assert sum(seconds[name] for name in parts) == pytest.approx(seconds["step_seconds"], abs=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_lag_trains_on_older_batches(warm_start: Path, tmp_path: Path, tied: bool) -> None:
    """Lag 2: updates 1, 2, 3 train on batches of version 0, update 4 on one of version 1."""
    warm = make_warm_start(tmp_path / "warm", seed=1, tie_word_embeddings=True) if tied else warm_start
    steps = train(tmp_path / "run", warm, 2, "trainer.steps=5", "rollout.lag=2", "parallel.pipeline=2")
    assert [s["staleness_max"] for s in steps] == [0, 1, 2, 2, 2]
    assert steps[0]["logprob_difference_max"] < 1e-4 < steps[2]["logprob_difference_max"]


def test_grpo_trains_on_groups(warm_start: Path, tmp_path: Path) -> None:
    steps = train(tmp_path / "run", warm_start, 1, "algorithm=grpo", "trainer.steps=2")
    assert len(steps) == 2
    assert "clip_fraction" in steps[0]
    assert "gate_acceptance" not in steps[0]


def test_the_rehearsal_learns(tmp_path: Path) -> None:
    """The command as a user runs it, to its end: the bars of docs/benchmarks.md on one seed."""
    output = tmp_path / "rehearsal"
    command = [sys.executable, "-m", "nemo_flashrl.cli", "rehearse", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    success = [step["success"] for step in read_metrics(output / "run" / "metrics.jsonl")]
    assert success[0] <= 0.35
    assert statistics.mean(success[-20:]) >= 0.88
    greedy = float(done.stdout.split("% greedy")[0].split()[-1])
    assert greedy >= 97
    assert "FAIL" not in done.stdout
    lines = (output / "run" / "samples.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["text"].startswith("Q k ")
