"""Each rule of the doctor fires on a run that has its fault, and none on a healthy one.

The runs in tests/recordings were recorded with the fault in them, by record.py there. The others are written by hand
into the healthy run here; beside each stands why it cannot be provoked.
"""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path

import pytest

from nemo_flashrl.cli import main
from nemo_flashrl.doctor.examine import RULES, as_text, examine
from nemo_flashrl.run.jsonl import append_json_lines
from nemo_flashrl.metrics.table import with_new_names
from nemo_flashrl.run.lock import locked
from nemo_flashrl.run.record import RunRecord, read_run

RUNS = Path(__file__).parent / "recordings"
RECORDED = {  # rule -> the run in which it has to fire
    "exploding_gradient": "reward_scale_jumps",
    "advantage_jump": "reward_scale_jumps",
    "kl_runs_away": "kl_grows",
    "reference_too_far": "average_lags",
    "reward_hacking": "reward_pays_for_calls",
    "loss_without_progress": "noise_for_a_reward",
    "few_unique_samples": "cold_groups",
    "tied_groups": "groups_never_rewarded",
    "equal_rewards": "one_turn",
    "sampler_mismatch": "cold_sampler",
    "gate_rejects_stale": "stale",
    "gate_rejects_fresh": "delta_of_zero",
    "clipped": "narrow_clip",
    "extreme_ratios": "wrong_logprobs",
    "too_old": "too_old",
    "environment_errors": "environment_fails",
    "cut_by_limits": "one_turn",
    "trainer_waits": "slow_environment",
    "rollouts_wait": "trainer_is_slow",
    "imbalance": "few_for_two_ranks",
    "slow_refit": "slow_refit",
    "padding": "short_for_two_ranks",
    "entropy_collapse": "one_answer_for_all",
}
WRITTEN = {  # rule -> (numbers of the last five steps, settings)
    "not_finite": ({"grad_norm": None}, {}),  # Megatron ends a run at the first such gradient, before its line
    "memory_full": (
        {"memory_peak_gib": 77.0, "memory_total_gib": 79.0},
        {},
    ),  # others need this memory
    "fragmentation": ({"memory_retries": 3.0}, {}),  # a GPU's allocator retries; a CPU has none
    "recompute_missing": ({"recompute_active": 0.0}, {"recompute": "full"}),  # this package's models do recompute
    "flash_attention_missing": ({"flash_attention_active": 0.0}, {}),  # a CPU has none, and a run there says nothing
}


def lines_of(name: str) -> list[dict]:
    """As version 0.1.0 wrote them; the first holds the configuration."""
    with gzip.open(RUNS / f"{name}.jsonl.gz", "rt") as file:
        return list(map(json.loads, file))


def recorded(name: str) -> RunRecord:
    first, *steps = lines_of(name)
    return RunRecord(RUNS / name, [with_new_names(step) for step in steps], first["configuration"])


def fired(run: RunRecord) -> dict[str, str]:
    return {finding.rule.name: finding.evidence for finding in examine(run)}


def test_every_rule_has_its_run() -> None:
    assert sorted(rule.name for rule in RULES) == sorted([*RECORDED, *WRITTEN])


@pytest.mark.parametrize("name", ["healthy", "healthy_grpo"])
def test_none_fires_on_a_healthy_run(name: str) -> None:
    assert fired(recorded(name)) == {}


@pytest.mark.parametrize("name", RECORDED)
def test_a_rule_fires_where_its_fault_is(name: str) -> None:
    evidence = fired(recorded(RECORDED[name]))
    assert name in evidence
    assert any(character.isdigit() for character in evidence[name])


@pytest.mark.parametrize("name", WRITTEN)
def test_a_rule_fires_where_its_fault_is_written(name: str) -> None:
    run, (numbers, model) = copy.deepcopy(recorded("healthy")), WRITTEN[name]
    for step in run.steps[-5:]:
        step.update(numbers)
    run = RunRecord(run.folder, run.steps, {**run.configuration, "model": {**run.configuration["model"], **model}})
    assert list(fired(run)) == [name]
    if name != "fragmentation":  # it looks at a mean
        assert "steps 76-80" in fired(run)[name]


def test_evidence_names_metric_and_steps() -> None:
    text = as_text(recorded("reward_scale_jumps"), examine(recorded("reward_scale_jumps")))
    assert "advantage_std goes from" in text
    assert "at step 16" in text
    assert "change    keep the reward scale fixed" in text


def test_the_command(tmp_path: Path, capsys) -> None:
    for name, code, words in (
        ("healthy", 0, "no rule fires"),
        ("one_turn", 1, "Many episodes end at a limit (truncated)"),
        ("trainer_is_slow", 1, "rollout_idle_seconds_during_training is "),  # named otherwise in the recording
    ):
        folder = tmp_path / name
        folder.mkdir()
        first, *steps = lines_of(name)
        (folder / "config.yaml").write_text(json.dumps(first["configuration"]))  # JSON is YAML too
        append_json_lines(folder / "metrics.jsonl", steps)
        assert main(["doctor", str(folder)]) == code
        assert words in capsys.readouterr().out
    assert main(["doctor", str(tmp_path)]) == 2


def test_a_run_of_one_step_and_of_unknown_numbers_is_no_error(tmp_path: Path) -> None:
    assert fired(RunRecord(tmp_path, [{"step": 1, "mine": "text", "loss": 0.5}], {})) == {}


TRACEBACK = 'Traceback (most recent call last):\n  File "/work/my_task.py", line 12, in step\n    boom()\n'
ENDS = {  # rule -> what the logs of ranks 0 and 1 hold after their last start, and words of the evidence
    "device_out_of_memory": (
        f"{TRACEBACK}--- ended: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n",
        "--- ended: Preempted: stopped by SIGTERM\n",
        "rank 0: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (/work/my_task.py:12)",
    ),
    "host_out_of_memory": (
        "--- ended: RuntimeError: Connection closed by peer\n",
        "--- ended: RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes\n",
        "rank 1: RuntimeError: DefaultCPUAllocator",
    ),
    "killed": ("--- ended: RuntimeError: Connection closed by peer\n", "step 1\n", "the log of rank 1 breaks off"),
    "failed": (
        "--- ended: RuntimeError: Connection closed by peer\n",
        f"{TRACEBACK}--- ended: KeyError: 'prompt'\n",
        "rank 1: KeyError: 'prompt' (/work/my_task.py:12)",
    ),
}


@pytest.mark.parametrize("rule", ENDS)
def test_a_run_that_ended_in_its_first_step_says_what_ended_it(rule: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "logs").mkdir()
    *ranks, evidence = ENDS[rule]
    for rank, end in enumerate(ranks):
        earlier = "--- started: a\n--- ended: OutOfMemoryError: of an earlier start\n"
        (tmp_path / "logs" / f"rank-{rank}.log").write_text(f"{earlier}--- started: b\nchatter\n{end}")
    (found,) = examine(read_run(tmp_path, may_be_empty=True))
    assert found.rule.name == rule
    assert found.evidence.startswith(evidence)
    assert main(["doctor", str(tmp_path)]) == 1
    page = capsys.readouterr().out
    assert "no step is done, 1 finding(s)" in page
    assert evidence in page and found.rule.change in page
    with locked(tmp_path):  # a run is at work there: it has not ended
        assert examine(read_run(tmp_path, may_be_empty=True)) == []


def test_a_run_that_ended_well_has_no_end_to_tell(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").write_text("--- started: a\n--- ended: done\n")
    assert examine(read_run(tmp_path, may_be_empty=True)) == []
    with pytest.raises(ValueError, match="holds no metrics.jsonl"):
        read_run(tmp_path)
