"""Runs that are stopped, killed, starved of disk or started again at other parallel sizes, on the real trainer.

`FLASHRL_KILLS=10 pytest tests/whole_runs/test_survival.py -k any_moment` kills ten times instead of three;
FLASHRL_KILLS_SEED draws other moments.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import run_ranks
from safetensors.torch import load_file

from nemo_flashrl.metrics.table import from_machine
from nemo_flashrl.plan.fitting import disk_use
from nemo_flashrl.plan.memory import Layout
from nemo_flashrl.run.folder import EXIT_PREEMPTED, complete_checkpoints
from nemo_flashrl.run.jsonl import read_json_lines
from nemo_flashrl.weights.model_shape import model_shape

BATCH, EPOCH = 8, 40  # an epoch is five steps
REFERENCE = ("reference.mode=ema", "reference.beta=0.8", "kl.coefficient=0.01", "kl.schedule=adaptive")
BASELINES = ("algorithm.settings.baseline=both", "value_head.learning_rate=0.05")  # both remember
TP2_PP2 = ("parallel.tensor=2", "parallel.pipeline=2")
KILLS = int(os.environ.get("FLASHRL_KILLS", "3"))
STEPS = 2 * KILLS + 2  # a kill comes while one of the next two checkpoints is written
KILLED = -signal.SIGKILL


def settings(output: Path, model: Path, steps: int, *overrides: str) -> list[str]:
    return [
        f"output={output}",
        f"model.path={model}",
        f"trainer.steps={steps}",
        f"rollout.batch_size={BATCH}",
        f"environment.settings.num_tasks={EPOCH}",
        *overrides,
    ]


def train(output: Path, model: Path, steps: int, *overrides: str, processes: int = 1, **options) -> str:
    return run_ranks(processes, "training", "rehearsal", *settings(output, model, steps, *overrides), **options)


def metrics(run: Path) -> list[dict]:
    """The lines as they are, without what the clock and the memory said."""
    lines = read_json_lines(run / "metrics.jsonl")
    return [{k: v for k, v in line.items() if not from_machine(k)} for line in lines]


def prompts(run: Path) -> list[tuple[int, int]]:
    """(step, prompt index) of every trajectory that was trained on."""
    return [(row["step"], row["prompt_index"]) for row in read_json_lines(run / "trajectories.jsonl")]


@pytest.fixture(scope="module")
def straight(warm_start: Path, tmp_path_factory) -> Path:
    """All steps in one go."""
    run = tmp_path_factory.mktemp("straight") / "run"
    train(run, warm_start, STEPS, "checkpoint.every_steps=0")
    return run


@pytest.mark.parametrize(
    ("processes", "sizes", "tolerance"), [(1, (), 0.0), (4, TP2_PP2, 1e-6)], ids=["one", "tp2 pp2"]
)
def test_stopped_and_resumed_is_as_straight(warm_start: Path, tmp_path: Path, processes, sizes, tolerance) -> None:
    """Stopped exactly at an epoch's end; dropout makes every number depend on each rank's random generators."""

    def run(name: str, steps: int) -> dict[str, torch.Tensor]:
        out = tmp_path / f"{name}.pt"
        options = ("checkpoint.every_steps=100", "algorithm.settings.delta=inf", *BASELINES, *REFERENCE, *sizes)
        overrides = settings(tmp_path / name, warm_start, steps, *options)
        run_ranks(processes, "whole_run", out, *overrides, dropout=0.1)
        return torch.load(out)

    whole = run("whole", 10)
    run("halves", 5)
    resumed = run("halves", 10)
    assert whole.keys() == resumed.keys()
    for name, tensor in whole.items():
        assert (tensor - resumed[name]).abs().max() <= tolerance, name
    lines, again = metrics(tmp_path / "whole"), metrics(tmp_path / "halves")
    assert [line["step"] for line in again] == list(range(1, 11))
    assert sum(line["grad_norm"] > 0 for line in lines) > 5
    for name, value in lines[9].items():
        if isinstance(value, int | float):
            assert again[9][name] == pytest.approx(value, rel=tolerance, abs=tolerance), name
    if processes == 1:
        assert again == lines
    assert prompts(tmp_path / "halves") == [(1 + i // BATCH, i) for i in range(10 * BATCH)]


def test_a_resumed_run_trains_with_the_settings_that_it_was_resumed_with(warm_start: Path, tmp_path: Path) -> None:
    """A cosine of 2 steps made one of 4, two of which are done: (1 + cos(pi / 2)) / 2 = 1/2 of the new rate."""
    schedule = ("optimizer.schedule=cosine", "optimizer.warmup_steps=0", *REFERENCE)
    first = settings(tmp_path / "run", warm_start, 2, *schedule, "optimizer.learning_rate=1e-3")
    run_ranks(1, "whole_run", tmp_path / "first.pt", *first)
    changed = ("optimizer.learning_rate=1e-5", "optimizer.weight_decay=0.1", "optimizer.beta1=0.8")
    again = settings(
        tmp_path / "run", warm_start, 4, *schedule, *changed, "optimizer.beta2=0.99", "checkpoint.resume=true"
    )
    run_ranks(1, "whole_run", tmp_path / "again.pt", *again)
    rates = [line["learning_rate"] for line in metrics(tmp_path / "run")]
    assert rates == pytest.approx([1e-3, 5e-4, 5e-6, 1e-5 * (1 - math.sqrt(0.5)) / 2])  # those that the steps used
    groups = json.loads((tmp_path / "again.json").read_text())
    assert sorted(group["weight_decay"] for group in groups) == [0, 0.1]  # norms and biases have none
    assert {tuple(group["betas"]) for group in groups} == {(0.8, 0.99)}
    before, after = (torch.load(tmp_path / f"{name}.pt") for name in ("first", "again"))
    moved = max(float((after[name] - value).abs().max()) for name, value in before.items() if name[:6] == "weight")
    assert 0 < moved < 4e-5  # two steps of Adam at 5e-6 and 1.5e-6


MOMENTS = [  # what is there when the process is killed, or soon after
    "checkpoints/step=*-unfinished",  # the write has begun
    "checkpoints/step=*/weights/common.pt",
    "checkpoints/step=*/weights/*.distcp",  # tensors are being written
    "checkpoints/step=*/weights/.metadata",
    "checkpoints/step=*/weights/metadata.json",  # complete, but still marked
    "metrics.jsonl",
]


def test_killed_at_any_moment(warm_start: Path, straight: Path, tmp_path: Path) -> None:
    """SIGKILL again and again; in the end the run is bit for bit the one that was never killed."""
    draw = random.Random(os.environ.get("FLASHRL_KILLS_SEED", "0"))
    run = tmp_path / "run"
    options = ("checkpoint.every_steps=1", "checkpoint.keep=2")
    reached = killed = 0
    for kill in range(KILLS):
        moment = MOMENTS[2 * kill] if kill < 3 else draw.choice(MOMENTS)
        step = max(1, reached + draw.choice([1, 2] if kill < 3 else [-1, 1, 2]))  # an older one is being removed
        pattern = moment.replace("step=*", f"step={step}")
        strike = (0, signal.SIGKILL, run, pattern, draw.choice([0.0, 0.001, draw.random() / 20]))
        train(run, warm_start, STEPS, *options, strike=strike, exit_codes=(KILLED, 0))
        if (run / "checkpoint").exists():  # the strike came too late
            break
        killed += 1
        complete = complete_checkpoints(run / "checkpoints")
        assert len(complete) >= min(2, max(complete, default=0))  # an old one goes only when a newer one is complete
        assert max(complete, default=0) >= reached
        reached = max(complete, default=0)
    assert killed
    if not (run / "checkpoint").exists():
        train(run, warm_start, STEPS, *options)
    assert metrics(run) == metrics(straight)
    assert prompts(run) == prompts(straight) == [(1 + i // BATCH, i) for i in range(STEPS * BATCH)]
    ours, theirs = (load_file(folder / "checkpoint" / "model.safetensors") for folder in (run, straight))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.parametrize("sizes", [("parallel.pipeline=2",), ()], ids=["tp1 pp2", "tp1 pp1"])
def test_resumed_at_other_parallel_sizes(saved_at_tp2, warm_start: Path, tmp_path: Path, sizes) -> None:
    """The vocabulary of 23 tokens is padded to 256 rows at TP=2 and to 128 at TP=1."""
    run, state = saved_at_tp2
    shutil.copytree(run, tmp_path / "run")
    overrides = settings(tmp_path / "run", warm_start, 2, *REFERENCE, *sizes)
    run_ranks(1 + len(sizes), "whole_run", tmp_path / "state.pt", *overrides)
    restored = torch.load(tmp_path / "state.pt")
    assert restored.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(restored[name], tensor), name
        assert tensor.abs().max() > 0
    moved = sum(bool((state[f"reference {n[7:]}"] != t).any()) for n, t in state.items() if n.startswith("weight "))
    assert moved > 10  # the average is not the policy


@pytest.fixture(scope="module")
def saved_at_tp2(warm_start: Path, tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    root = tmp_path_factory.mktemp("tp2")
    overrides = settings(root / "run", warm_start, 2, *REFERENCE, "parallel.tensor=2")
    run_ranks(2, "whole_run", root / "state.pt", *overrides)
    return root / "run", torch.load(root / "state.pt")


def test_sigterm_to_one_rank_saves_on_all(warm_start: Path, straight: Path, tmp_path: Path) -> None:
    """Rank 1 alone is told to stop; both end after the same step, with the code that asks for a requeue."""
    run = tmp_path / "run"
    options = ("checkpoint.every_steps=0", "parallel.pipeline=2")
    strike = (1, signal.SIGTERM, run, "metrics.jsonl", 0.0)
    said = train(run, warm_start, 1000, *options, processes=2, strike=strike, exit_codes=(EXIT_PREEMPTED,))
    (step,) = complete_checkpoints(run / "checkpoints")
    assert [line["step"] for line in metrics(run)] == list(range(1, step + 1))
    assert f"stopped by SIGTERM after step {step} of 1000" in said
    assert (run / "preempted").exists()
    assert not (run / "checkpoint").exists()
    train(run, warm_start, step + 2, *options, processes=2)
    assert [line["step"] for line in metrics(run)] == list(range(1, step + 3))
    assert prompts(run) == [(1 + i // BATCH, i) for i in range((step + 2) * BATCH)]
    assert not (run / "preempted").exists()


def test_ctrl_c_saves_too(warm_start: Path, straight: Path, tmp_path: Path) -> None:
    """Before the first checkpoint; as a person stopped it, no requeue is asked for."""
    run = tmp_path / "run"
    strike = (0, signal.SIGINT, run, "metrics.jsonl", 0.0)
    said = train(run, warm_start, 1000, strike=strike, exit_codes=(130,))
    (step,) = complete_checkpoints(run / "checkpoints")
    assert f"stopped by Ctrl-C after step {step} of 1000; rerun the same command to resume" in said
    assert "a second one ends the run at once" in said
    assert not (run / "preempted").exists()
    written = sum(file.stat().st_size for file in (run / "checkpoints").rglob("*") if file.is_file())
    shape = model_shape(json.loads((warm_start / "config.json").read_text()))
    planned = disk_use(shape, Layout(precision="fp32"), written=1, keep=1).checkpoint
    assert planned < written < planned + 400_000  # metadata and generators beside the tensors
    train(run, warm_start, step + 1)
    assert metrics(run) == metrics(straight)[: step + 1]


def test_a_second_ctrl_c_ends_the_process() -> None:
    said = run_ranks(1, "interrupted_twice", exit_codes=(-signal.SIGINT,))
    assert f"asked by {signal.SIGINT:d}" in said and "still here" not in said


def test_a_complete_run_that_is_started_again_is_a_success(warm_start: Path, tmp_path: Path) -> None:
    """As a job that was requeued after its last step: under torchrun too, said once, nothing changed."""
    run = tmp_path / "run"
    options = ("parallel.tensor=2", "checkpoint.every_steps=0")
    train(run, warm_start, 1, *options, processes=2)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [f"--log-dir={tmp_path / 'logs'}", "-m"]
    command += ["nemo_flashrl.cli", "train", "rehearsal", *settings(run, warm_start, 1, *options)]
    again = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert again.returncode == 0, again.stderr
    assert again.stdout == (
        f"flashrl train: output='{run}': the run is complete (1 steps), its policy in {run}/checkpoint\n"
    )
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_sigterm_ends_the_wait_for_servers(warm_start: Path, tmp_path: Path) -> None:
    """Two ranks: one waits for a server that never says that it is well, the other for the first."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        served = ["rollout=vllm", f"rollout.servers=[{url}]", "parallel.tensor=2"]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += [f"--log-dir={tmp_path / 'logs'}", "-m", "nemo_flashrl.cli", "train", "rehearsal"]
        command += settings(tmp_path / "run", warm_start, 1, *served)
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        silent.settimeout(300)
        asked, _ = silent.accept()
        with asked:
            os.killpg(process.pid, signal.SIGTERM)
            said = process.communicate(timeout=200)[1]  # rollout.server_timeout is 300
    assert "stopped by SIGTERM before its first step" in said


def test_a_full_disk_is_reported_and_the_last_checkpoint_stays(
    warm_start: Path, straight: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = ("checkpoint.every_steps=4", "checkpoint.keep=1")
    train(run, warm_start, 4, *options)
    said = train(run, warm_start, 8, *options, file_bytes=400_000, exit_codes=(1,))
    assert "flashrl train: the checkpoint of step 8 could not be written" in said
    assert "Traceback" not in said
    assert "File too large" in said
    assert "the checkpoint of step 4 is complete and is kept" in said
    assert list(complete_checkpoints(run / "checkpoints")) == [4]
    train(run, warm_start, 8, *options)
    assert list(complete_checkpoints(run / "checkpoints")) == [8]
    assert metrics(run) == metrics(straight)[:8]


def test_killed_with_a_batch_half_collected(warm_start: Path, tmp_path: Path) -> None:
    """Episodes stream on over the update: no prompt is trained twice, and those in flight come again."""
    run = tmp_path / "run"
    options = ("checkpoint.every_steps=2", "rollout.mode=async", f"rollout.max_in_flight={2 * BATCH}")
    strike = (0, signal.SIGKILL, run, "checkpoints/step=4/weights/metadata.json", 0.05)
    train(run, warm_start, 1000, *options, strike=strike, exit_codes=(KILLED,))
    resumed_at = max(complete_checkpoints(run / "checkpoints"))
    train(run, warm_start, resumed_at + 10, *options)
    steps = [line["step"] for line in metrics(run)]
    assert steps == list(range(1, resumed_at + 11))
    trained = [prompt for _, prompt in prompts(run)]
    assert len(trained) == len(set(trained)) == len(steps) * BATCH
    # What is not trained yet is in flight or waits; nothing older than that was left out.
    assert set(range(len(trained) - 3 * BATCH)) <= set(trained)
    state = torch.load(run / "checkpoints" / f"step={steps[-1]}" / "weights" / "common.pt", weights_only=False)
    stream = state["RolloutDataModule"]["rollouts"]["prompts"]
    assert sorted(trained + stream["unfinished"]) == list(range(stream["position"]))
    json.dumps(stream)
