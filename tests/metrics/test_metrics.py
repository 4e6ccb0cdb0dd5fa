"""Numbers of a batch derived by hand, the table that names them, the files and the terminal line that show them."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from tiny import random_trajectories

from nemo_flashrl.metrics.progress import Progress, rewrite
from nemo_flashrl.metrics.repetition import distinct_answers, last_action, repeated_token_share
from nemo_flashrl.metrics.step import group_metrics, policy_metrics, trajectory_metrics
from nemo_flashrl.metrics.table import MEAN, SUM, TABLE, find_metric, from_machine
from nemo_flashrl.metrics.trajectory_log import readable, trajectory_row
from nemo_flashrl.records import Trajectory
from nemo_flashrl.run.jsonl import append_json_lines


def trajectory(tokens: str, mask: str, **fields) -> Trajectory:
    """One letter a token; `x` in the mask where the policy sampled it."""
    sampled = np.array([m == "x" for m in mask])
    defaults = {"prompt_index": 0, "group": 0, "reward": 0.0, "turns": 1, "end_reason": "done", "failed": True}
    return Trajectory(
        token_ids=np.array([ord(t) for t in tokens]),
        action_mask=sampled,
        behavior_logprobs=np.where(sampled, -0.5, 0).astype(np.float32),
        versions=np.where(sampled, 3, -1).astype(np.int32),
        **{**defaults, **fields},
    )


class Letters:
    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def test_a_name_stands_once_and_says_how_it_is_reduced() -> None:
    names = [metric.name for metric in TABLE]
    assert len(names) == len(set(names))
    for metric in TABLE:
        assert metric.meaning
        assert bool(metric.numerator) == (metric.source in (MEAN, SUM)), metric.name
        assert bool(metric.denominators) == (metric.source == MEAN), metric.name


def test_families_of_names() -> None:
    assert find_metric("dropped_too_old").unit == "trajectories"
    assert find_metric("dropped_ratio_guard").numerator == "guarded"
    assert find_metric("my_plugin") is None
    assert from_machine("refit_seconds") and from_machine("memory_peak_gib") and from_machine("new_seconds")
    assert not from_machine("loss")


def test_a_mean_is_divided_by_its_own_count_and_unknown_sums_pass() -> None:
    """Ratio 9 over 6 admitted of 10 action tokens: 1.5, not 0.9. Without a gate all tokens count."""
    sums = {"loss": 1.0, "rows": 4.0, "admitted": 2.0, "ratio": 9.0, "admitted_tokens": 6.0, "policy_tokens": 10.0}
    numbers = policy_metrics(sums | {"kl": 5.0, "mine": 7.0, "ratio_max": 3.0})
    assert numbers == {
        "loss": 1.0,
        "gate_acceptance": 0.5,
        "ratio_mean": 1.5,
        "kl": 0.5,
        "policy_tokens": 10.0,
        "mine": 7.0,
        "ratio_max": 3.0,
    }
    assert policy_metrics({"ratio": 9.0, "policy_tokens": 10.0})["ratio_mean"] == 0.9
    # A step whose trajectories are all left out has rejected none.
    assert policy_metrics({"loss": 0.0, "rows": 0.0, "admitted": 0.0, "ratio": 0.0, "policy_tokens": 0.0}) == {
        "loss": 0.0,
        "policy_tokens": 0.0,
    }


def test_repeated_tokens() -> None:
    """Twelve tokens, then ten of them again: 10 of 22. Observations in between are not the policy's words."""
    assert repeated_token_share(trajectory("abcdefghijkl" + "abcdefghij", "x" * 22)) == pytest.approx(10 / 22)
    spread = trajectory("abcdefghijkl" + "???" + "abcdefghij", "x" * 12 + "..." + "x" * 10)
    assert repeated_token_share(spread) == pytest.approx(10 / 22)
    assert repeated_token_share(trajectory("abcdefgabcdefg", "x" * 14)) == 0.0  # 7 in a row: no 8-gram twice
    assert repeated_token_share(trajectory("a" * 20, "x" * 20)) == 0.95  # all but the first token
    assert repeated_token_share(trajectory("abcdefghijkl" * 2, "." * 24)) == 0.0


def test_groups() -> None:
    """Group 0: rewards 1, 0, samples differ. Group 5: rewards 1, 1, the same sample twice: tied, 1/2 unique."""
    group = [
        trajectory("qab", ".xx", reward=1.0),
        trajectory("qac", ".xx"),
        trajectory("rab", ".xx", group=5, reward=1.0),
        trajectory("sab", ".xx", group=5, reward=1.0),  # another prompt's text, the same actions
    ]
    numbers = group_metrics(group, [1.0, -1.0, 0.0, math.nan])
    assert numbers["tied_groups"] == 0.5
    assert numbers["unique_sample_share"] == 0.75
    assert numbers["group_reward_std"] == 0.25
    assert numbers["group_advantage_std"] == 0.5
    assert numbers["group_size"] == 2
    assert group_metrics([replace(t, group=i) for i, t in enumerate(group)], [0.0] * 4) == {}


def test_last_action_and_distinct_answers() -> None:
    first, second = trajectory("qabocd", ".xx.xx"), trajectory("qzzocd", ".xx.xx")
    assert last_action(first).tolist() == [ord("c"), ord("d")]
    assert distinct_answers([first, second, trajectory("qab", ".xx")]) == 2


def test_what_a_batch_writes_is_in_the_table() -> None:
    batch = random_trajectories(8, 9, group_size=4)
    numbers = {**trajectory_metrics(batch, 0), **group_metrics(batch, [0.0] * 8)}
    assert [name for name in numbers if find_metric(name) is None] == []
    assert sum(numbers["reward_histogram"]["counts"]) == 8


def test_a_trajectory_as_a_row_and_as_text(tmp_path) -> None:
    shown = trajectory("qqabo<c", "..xx..x", reward=1.0, failed=False, turns=2, info={"k": 1})
    row = trajectory_row(shown, step=7, policy_version=6, advantage=0.25)
    assert (row["tokens"], row["action_tokens"], row["staleness"], row["advantage"]) == (7, 3, 3, 0.25)
    assert readable(shown, Letters(), 0.25)["text"] == "qq [ab | +0.25] o< [c | +0.25]"
    kinds = [(s["kind"], s["text"]) for s in readable(shown, Letters(), 0.25)["segments"]]
    assert kinds == [("prompt", "qq"), ("action", "ab"), ("observation", "o<"), ("action", "c")]
    pandas = pytest.importorskip("pandas")
    append_json_lines(tmp_path / "t.jsonl", [row, {**row, "advantage": math.nan}])
    table = pandas.read_json(tmp_path / "t.jsonl", lines=True)
    assert table["reward"].tolist() == [1.0, 1.0]
    assert math.isnan(table["advantage"][1])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def step_record(step: int, seconds: float = 2.0) -> dict:
    times = {"step_seconds": seconds, "rollout_seconds": 1.5, "train_seconds": 0.4, "refit_seconds": 0.1}
    return {"step": step, "reward_mean": 0.5, "success": 0.25, "turns": 3.0, "tokens_per_second": 4200.0, **times}


def test_plain_lines_come_at_their_interval() -> None:
    out, now = io.StringIO(), [0.0]
    progress = Progress(50, out, interval=5.0, clock=lambda: now[0])
    for step in range(1, 51):
        now[0] = 2.0 * step
        progress.wait_for("rollouts")
        progress.step_done(step_record(step))
    lines = out.getvalue().splitlines()
    steps = [int(re.match(r"step +(\d+)/50 ", line)[1]) for line in lines]
    assert steps == [1, *range(4, 50, 3), 50]  # 2 s a step: every third is 6 s after the one before
    assert "4.2k tokens/s" in lines[0]
    assert "75% rollouts" in lines[0]
    assert "ETA 1:38" in lines[0]  # 49 steps of 2 s


def test_a_line_gives_the_time_of_its_own_step_and_the_eta_of_a_usual_one() -> None:
    out = io.StringIO()
    progress = Progress(10, out, interval=0.0)
    for step, seconds in ((1, 15.6), (2, 15.4), (3, 62.0)):  # a server was down in the third
        progress.step_done(step_record(step, seconds))
    last = out.getvalue().splitlines()[-1]
    assert "62.00 s/step" in last and "ETA 1:49" in last  # 7 steps of 15.6 s


def test_a_terminal_has_one_line_that_says_what_it_waits_for(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out = Terminal()
    progress = Progress(2, out)
    progress.wait_for("rollouts")
    progress.step_done(step_record(1))
    progress.wait_for("training")
    progress.step_done(step_record(2))
    assert out.getvalue().count("\n") == 1
    assert out.getvalue().split("\r\x1b[K")[3].endswith("now: training")
    monkeypatch.setenv("COLUMNS", "10")
    assert rewrite("0123456789abc\n") == "\r\x1b[K012345678\n"
