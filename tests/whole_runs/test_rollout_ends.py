"""`flashrl train` with rollouts in trouble: it ends within seconds, with the right code, and lets go of them."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from processes import run_ranks

from nemo_flashrl.run.folder import EXIT_PREEMPTED, complete_checkpoints
from nemo_flashrl.run.jsonl import read_json_lines, read_metrics

KILLED = -signal.SIGKILL


def train(folder: Path, model: Path, *overrides: str, strike: int | None = None, rank: int = 0, **options) -> str:
    """Batches of eight; the signal `strike` comes a moment after the trouble has begun."""
    return run_ranks(
        options.pop("processes", 1),
        "training",
        "rehearsal",
        f"output={folder / 'run'}",
        f"model.path={model}",
        "trainer.steps=6",
        "rollout.batch_size=8",
        "rollout.step_timeout=100000",
        "environment.name=workers.troubled.Troubled",
        f"environment.settings.folder={folder}",
        "checkpoint.every_steps=0",
        *overrides,
        strike=strike and (rank, strike, folder, "trouble", 0.2),
        timeout=120,
        **options,
    )


def closed(folder: Path) -> set[int]:
    return {int(path.name.partition("-")[2]) for path in folder.glob("closed-*")}


@pytest.mark.parametrize("mode", ["async", "in_flight"])
def test_a_sound_run_beside_its_rollouts(warm_start: Path, tmp_path: Path, mode: str) -> None:
    """Every prompt once, over steps that train on what older weights sampled too."""
    train(tmp_path, warm_start, f"rollout.mode={mode}", "rollout.max_in_flight=12", "environment.settings.sound=100000")
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert all(sum(step[f"staleness_{age}"] for age in ("0", "1", "2_3", "4_7", "8_up")) == 1 for step in steps)
    assert max(step["staleness_max"] for step in steps) >= 1
    used = [row["prompt_index"] for row in read_json_lines(tmp_path / "run" / "trajectories.jsonl")]
    assert len(used) == len(set(used)) == 48


def test_sigterm_while_the_trainer_waits_for_a_batch(warm_start: Path, tmp_path: Path) -> None:
    """To the collecting rank of two, in the second batch: both end before the second step, and the first is saved."""
    said = train(tmp_path, warm_start, strike=signal.SIGTERM, processes=2, exit_codes=(EXIT_PREEMPTED,))
    assert "stopped by SIGTERM after step 1 of 6" in said
    assert list(complete_checkpoints(tmp_path / "run" / "checkpoints")) == [1]
    assert set(range(17, 25)) <= closed(tmp_path)


def test_sigterm_in_a_held_out_evaluation(warm_start: Path, tmp_path: Path) -> None:
    """The step that it follows is saved, whatever the evaluation waits for."""
    evaluated = ("evaluation.every_steps=1", "evaluation.tasks=8", "evaluation.settings={seed:1}")
    sound = "environment.settings.sound=24"  # the held-out tasks are checked at the start of a run too
    said = train(tmp_path, warm_start, *evaluated, sound, strike=signal.SIGTERM, exit_codes=(EXIT_PREEMPTED,))
    assert "stopped by SIGTERM after step 1 of 6" in said
    assert list(complete_checkpoints(tmp_path / "run" / "checkpoints")) == [1]
    assert "evaluation_success" not in read_metrics(tmp_path / "run" / "metrics.jsonl")[0]


def test_sigterm_while_an_environment_blocks_the_event_loop(warm_start: Path, tmp_path: Path) -> None:
    """For days: what it holds is left behind, and the run ends as if it had answered."""
    said = train(
        tmp_path, warm_start, "environment.settings.blocks=true", strike=signal.SIGTERM, exit_codes=(EXIT_PREEMPTED,)
    )
    assert "stopped by SIGTERM after step 1 of 6" in said
    assert "blocks the rollout thread; abandoning it" in said
    assert list(complete_checkpoints(tmp_path / "run" / "checkpoints")) == [1]


def test_ctrl_c_while_the_trainer_waits_for_a_batch(warm_start: Path, tmp_path: Path) -> None:
    said = train(tmp_path, warm_start, strike=signal.SIGINT, exit_codes=(130,))
    assert said.count("flashrl train: stopped by Ctrl-C after step 1 of 6") == 1
    assert list(complete_checkpoints(tmp_path / "run" / "checkpoints")) == [1]
    assert "Traceback" not in said
    assert set(range(17, 25)) <= closed(tmp_path)


def test_a_trainer_that_is_killed(warm_start: Path, tmp_path: Path) -> None:
    """The other rank meets its absence when it hands out the batch, and closes what streams on."""
    slow = ("environment.settings.seconds=0.5", "rollout.mode=in_flight", "environment.settings.sound=20")
    train(tmp_path, warm_start, *slow, strike=signal.SIGKILL, rank=1, processes=2, exit_codes=(KILLED, 1))
    assert len(closed(tmp_path)) == max(closed(tmp_path))


def test_a_collector_that_dies_while_the_trainer_trains(warm_start: Path, tmp_path: Path) -> None:
    said = train(
        tmp_path, warm_start, "environment.settings.long_prompt=true", "rollout.mode=in_flight", exit_codes=(2,)
    )
    assert said.count("flashrl train: environment.name='workers.troubled.Troubled': the prompt of task ") == 1
    assert "has 500 tokens and leaves no room" in said and "batching.on_too_long=drop" in said
