"""What a run writes and when it stops: JSON lines that always parse, an environment that is broken for good."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import random_trajectories

from nemo_flashrl.metrics.progress import Progress, logged
from nemo_flashrl.metrics.step import policy_metrics, trajectory_metrics
from nemo_flashrl.metrics.table import RENAMED, find_metric
from nemo_flashrl.records import Batch
from nemo_flashrl.rehearsal.summary import draw_curve
from nemo_flashrl.report.run_data import page_data
from nemo_flashrl.rollout.driver import RolloutDriver
from nemo_flashrl.run.jsonl import append_json_line, append_json_lines, read_metrics
from nemo_flashrl.run.record import read_run


def test_a_line_always_parses(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    append_json_line(file, {"a": float("nan"), "b": {"c": [1.0, float("inf")], "d": object}, "e": "\n"})
    (line,) = file.read_text().splitlines()
    assert json.loads(line) == {"a": None, "b": {"c": [1.0, None], "d": "<class 'object'>"}, "e": "\n"}


def test_a_line_torn_by_a_kill_costs_itself_alone(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    append_json_lines(file, [{"step": 1}, {"step": 2, "loss": 1.0}])
    with file.open("a") as torn:
        torn.write('{"step": 3, "lo')
    assert [s["step"] for s in read_metrics(file)] == [1, 2]
    append_json_line(file, {"step": 2, "loss": 9.0})  # a restarted run does step 2 again
    append_json_line(file, {"step": 3})
    assert read_metrics(file) == [{"step": 1}, {"step": 2, "loss": 9.0}, {"step": 3}]


def test_metrics_of_an_earlier_version_are_read_under_their_new_names(tmp_path: Path) -> None:
    append_json_line(tmp_path / "metrics.jsonl", {"step": 1, "loss": 0.5, **dict.fromkeys(RENAMED, 2.0)})
    assert read_run(tmp_path).steps == [{"step": 1, "loss": 0.5, **dict.fromkeys(RENAMED.values(), 2.0)}]
    assert not set(RENAMED) & set(page_data([tmp_path])["runs"][0]["series"])
    assert all(find_metric(name).name == name for name in RENAMED.values())


class Collector:
    def __init__(self, trajectories) -> None:
        self.trajectories = trajectories

    async def collect(self, version: int) -> Batch:
        return Batch(self.trajectories, version)

    def state_dict(self) -> dict[str, Any]:
        return {}


def test_an_environment_that_always_fails_stops_the_run_with_its_error() -> None:
    failed = tuple(
        replace(t, end_reason="environment_error", info={"error": "step: RuntimeError: boom"})
        for t in random_trajectories(3, 9)
    )
    with pytest.raises(ValueError, match="all 3 episodes of a batch failed; the first: step: RuntimeError: boom"):
        RolloutDriver(None, Collector(failed)).collect(0)
    mixed = (*failed[:2], *random_trajectories(1, 9))
    assert RolloutDriver(None, Collector(mixed)).collect(0).trajectories == mixed


def test_metrics_of_a_batch() -> None:
    """Rewards 1, 0: mean 1/2, deviation 1/2; versions 3 and 5 under policy 6 are 3 and 1 updates old."""
    first, second = random_trajectories(2, 9)
    first = replace(first, reward=1.0, failed=False, versions=first.versions * 0 + 3)
    second = replace(second, reward=0.0, failed=True, versions=second.versions * 0 + 5)
    metrics = trajectory_metrics([first, second], policy_version=6)
    assert (metrics["reward_mean"], metrics["reward_std"], metrics["success"]) == (0.5, 0.5, 0.5)
    assert (metrics["staleness_mean"], metrics["staleness_max"]) == (2.0, 3.0)


def test_means_of_sums() -> None:
    sums = {"loss": 0.5, "rows": 4.0, "policy_tokens": 20.0, "admitted": 3.0, "sequence_kl": 0.4, "guarded": 1.0}
    sums |= {"retained_tokens": 15.0, "extreme_tokens": 1.0, "ratio": 16.5, "admitted_tokens": 15.0, "ratio_max": 2.0}
    metrics = policy_metrics(sums)
    assert metrics["gate_acceptance"] == 0.75
    assert metrics["sequence_kl"] == pytest.approx(0.1)
    assert metrics["ratio_mean"] == pytest.approx(1.1)
    assert metrics["ratio_max"] == 2.0


def test_the_curve_rises_from_left_to_right() -> None:
    lines = draw_curve([0.0, 0.5, 1.0], rows=2)
    assert lines[0] == "1.0 │  █"
    assert lines[1] == "0.0 │ ██"


def written_by(module: str, folder: Path, source: str) -> Any:
    """`speak(...)` of a module of that name, in a file of that folder."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{module}.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(module, file)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found.speak


def test_what_others_say_goes_to_the_log_alone(tmp_path: Path, capsys) -> None:
    """The screen has our lines, the user's, and errors; the log has everything, and what ended the run."""
    says = "import sys\n\ndef speak(text):\n    print(text, file=sys.stderr)\n"
    upstream = written_by("upstream", tmp_path / "site-packages", says)
    users = written_by("my_task", tmp_path, says)
    logger, users_logger = logging.getLogger("nemo_logger.test"), logging.getLogger("my_task")
    for own in (logger, users_logger):
        own.addHandler(logging.StreamHandler(sys.stderr))  # as one that was imported before has it
    with pytest.raises(KeyError), logged(tmp_path / "run", rank=3):
        upstream("chatter of a library")
        users("a print of the user's environment")
        logger.warning("chatter of a logger")
        logger.error("an error of a logger")
        users_logger.warning("a warning of the user's environment")
        Progress(1, interval=0).step_done(
            {
                **{"step": 1, "step_seconds": 1.0, "train_seconds": 1.0, "reward_mean": 0.0, "success": 0.0},
                **{"turns": 1.0, "tokens_per_second": 5.0},
            }
        )
        raise KeyError("oops")
    logger.warning("after the run")
    out, err = capsys.readouterr()
    assert out.startswith("step    1/1  reward 0.000")
    assert err.splitlines() == [
        "a print of the user's environment",
        "an error of a logger",
        "a warning of the user's environment",
        "after the run",
    ]
    log = (tmp_path / "run" / "logs" / "rank-3.log").read_text()
    for text in ("chatter of a library", "a print of the", "chatter of a logger", "an error of", "step    1/1"):
        assert text in log
    assert "after the run" not in log
    assert "Traceback (most recent call last)" in log
    assert log.splitlines()[-1] == "--- ended: KeyError: 'oops'"
