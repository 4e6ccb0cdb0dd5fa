"""What a run writes and when it stops: JSON lines that always parse, an environment that is broken for good."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import random_trajectories

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
