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
from paths import TESTS

from nemo_flashrl.cli import main
from nemo_flashrl.doctor.examine import RULES, as_text, examine
from nemo_flashrl.metrics.table import with_new_names
from nemo_flashrl.run.jsonl import append_json_lines
from nemo_flashrl.run.record import RunRecord

RUNS = TESTS / "recordings"
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
    "answers_never_end": ({"actions_truncated": 1.0}, {}),  # the recordings have no such metrics
    "answers_go_on": ({"actions_with_chat_tokens": 0.5}, {}),
    "fragmentation": ({"memory_retries": 3.0}, {}),  # a GPU's allocator retries; a CPU has none
    "recompute_missing": ({"recompute_active": 0.0}, {"recompute": "full"}),  # this package's models do recompute
    "all_left_out": (  # the policy of the healthy run is trained: it has no malformed action
        {"left_out_share": 1.0, "dropped_malformed": 64.0, "advantage_std": 0.0, "effective_samples": 0.0},
        {},
    ),
    "flash_attention_missing": ({"flash_attention_active": 0.0}, {}),  # a CPU has none, and a run there says nothing
}

SYNC_RULE = "sync_drifts"  # a server on a CPU renews all it has, and the rehearsal samples in process
SYNCS = {  # weight_sync_logprob_difference of each step -> whether the rule fires
    "a head that is never renewed": ([1.6e-4, 3.6e-4, 7e-4, 1.2e-3], True),
    "the same, under rounding in bf16": ([0.02 + 0.004 * n for n in range(12)], True),
    "ten times the first": ([2e-5, 3e-5, 2.5e-4], True),
    "rounding in bf16": ([0.02, 0.03, 0.025, 0.018, 0.022, 0.031, 0.02, 0.027, 0.024, 0.03], False),
    "rounding in fp32": ([4e-7, 9e-7, 1.4e-6, 2e-6, 5e-6], False),
    "two syncs": ([1e-4, 1e-2], False),
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
    assert sorted(rule.name for rule in RULES) == sorted([*RECORDED, *WRITTEN, SYNC_RULE])


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


@pytest.mark.parametrize("kind", SYNCS)
def test_a_sampler_that_drifts(tmp_path: Path, kind: str) -> None:
    values, fires = SYNCS[kind]
    steps = [{"step": n, "weight_sync_logprob_difference": value} for n, value in enumerate(values, 1)]
    evidence = fired(RunRecord(tmp_path, steps, {})).get(SYNC_RULE, "")
    assert bool(evidence) == fires
    if kind == "a head that is never renewed":
        assert evidence == "weight_sync_logprob_difference went from 0.00016 to 0.0012 nats per token, steps 1-4"


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
