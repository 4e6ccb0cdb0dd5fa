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
from nemo_flashrl.config import load, save
from nemo_flashrl.doctor.examine import RULES, as_text, examine
from nemo_flashrl.metrics.monitors import Monitors
from nemo_flashrl.metrics.table import with_new_names
from nemo_flashrl.run.jsonl import append_json_lines
from nemo_flashrl.run.lock import locked
from nemo_flashrl.run.record import RunRecord, read_run

RUNS = TESTS / "recordings"
RECORDED = {  # rule -> the run in which it has to fire
    "exploding_gradient": "reward_scale_jumps",
    "advantage_jump": "reward_scale_jumps",
    "kl_runs_away": "kl_grows",
    "reference_too_far": "average_lags",
    "reward_hacking": "reward_pays_for_calls",
    "no_progress": "noise_for_a_reward",
    "low_action_share": "noise_for_a_reward",
    "reward_cliff": "policy_collapses",
    "reward_decline": "forgets_slowly",
    "overfits": "shortcut_in_training_tasks",
    "length_grows": "shaping_pays_for_calls",
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


def written(columns: dict, **settings: dict) -> RunRecord:
    """A run of these columns, one number a step."""
    steps = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return RunRecord(Path("written"), [{"step": n, **step} for n, step in enumerate(steps, 1)], settings)


def noisy(values: list[float], noise: float = 0.02) -> list[float]:
    """Alternately above and below, so that the mean over an even number of steps stays."""
    return [value + noise * (-1) ** n for n, value in enumerate(values)]


CLIFF = [0.7] * 60 + [0.7 - 0.065 * n for n in range(1, 11)] + [0.05] * 30


def test_a_collapse_is_a_cliff() -> None:
    """Success .7 to .05 in ten steps while repetition rises from .05 to .9."""
    repeated = [0.05] * 60 + [0.05 + 0.085 * n for n in range(1, 11)] + [0.9] * 30
    run = written({"success": CLIFF, "reward_mean": CLIFF, "repeated_token_share": repeated})
    assert list(fired(run)) == ["reward_cliff"]
    # The middle half, .5375 to .2125, as means over five steps: centres 62 (.57) to 68 (.18).
    assert fired(run)["reward_cliff"] == (
        "success fell from 0.7 to 0.05, most of it in steps 62-68; since the first steps repeated_token_share from "
        "0.05 to 0.9"
    )
    assert list(fired(written({"reward_mean": [-v for v in CLIFF]}))) == []  # a rise
    cost = written({"reward_mean": [10 * v - 8 for v in CLIFF], "reward_std": [1.0] * 100})
    assert fired(cost)["reward_cliff"].startswith("reward_mean fell from -1 to -7.5, most of it in steps 62-68")


def test_what_comes_back_or_is_noise_is_no_fall() -> None:
    dip = [0.7] * 40 + [0.2] * 10 + [0.7] * 50
    assert fired(written({"success": noisy(dip), "reward_mean": noisy(dip)})) == {}
    loud = noisy([0.5] * 50 + [0.35] * 20, 0.3)  # four standard errors are 4 x 0.43 x sqrt(2 / 10) = 0.77
    assert fired(written({"success": loud})) == {}


def test_a_slow_fall_is_a_decline() -> None:
    success = noisy([0.8 - 0.004 * n for n in range(100)])
    evidence = fired(written({"success": success, "reward_mean": success}))
    assert list(evidence) == ["reward_decline"]
    # Means over ten steps: 0.8 - 0.004 x 4.5 at best, 0.8 - 0.004 x 94.5 at last; its middle half is 0.692 to 0.512.
    assert evidence["reward_decline"] == "success fell from 0.782 to 0.422, half of it in steps 28-74"
    small = noisy([0.8 - 0.0004 * n for n in range(100)])  # 3.6 points
    assert fired(written({"success": small})) == {}


@pytest.mark.parametrize(
    ("name", "stops"),
    [("policy_collapses", True), ("forgets_slowly", True), ("healthy", False), ("healthy_grpo", False)],
)
def test_a_monitor_stops_a_recorded_fall(name: str, stops: bool) -> None:
    limited, off = Monitors({"patience": 5, "success_drop": 0.15}), Monitors({"patience": 5, "success_drop": None})
    for step in recorded(name).steps:
        limited.see(step)
        off.see(step)
    assert off.reason == ""
    assert ("success_drop=" in limited.reason and "is above monitors.success_drop=0.15" in limited.reason) == stops


@pytest.mark.parametrize("success", [0.02, 0.4])
@pytest.mark.parametrize("share", [0.04, 0.4])
def test_no_progress_at_any_success_and_action_share(success: float, share: float) -> None:
    flat = noisy([success] * 200)
    columns = {"success": flat, "reward_mean": flat, "reward_std": [0.3] * 200, "action_token_share": [share] * 200}
    evidence = fired(written(columns))
    assert list(evidence) == ["no_progress", "low_action_share"][: 2 if share < 0.05 else 1]
    assert evidence["no_progress"] == (
        f"success {success:g} in the first and {success:g} in the last third of 200 steps, "
        f"reward_mean {success:g} and {success:g}, action_token_share {share:g}"
    )
    (change,) = (f.change for f in examine(written(columns)) if f.rule.name == "no_progress")
    assert change.index("diversity") < change.index("KL") < change.index("reward")
    short = {name: values[:40] for name, values in columns.items()}
    assert "no_progress" not in fired(written(short))
    rising = noisy([success + 0.0005 * n for n in range(200)])
    assert "no_progress" not in fired(written({**columns, "success": rising}))
    assert "no_progress" not in fired(written({**columns, "reward_mean": rising}))  # the reward has other terms


def held_out(values: list[float], training: list[float], **evaluation: float) -> RunRecord:
    """A value every ten steps."""
    known = [values[n // 10] if n % 10 == 9 else None for n in range(len(training))]
    return written({"success": training, "evaluation_success": known}, evaluation=evaluation)


def test_held_out_success_that_falls_while_training_rises() -> None:
    rising = [0.3 + 0.01 * n for n in range(60)]
    run = held_out([0.3, 0.5, 0.6, 0.6, 0.4, 0.3], rising, tasks=64, samples=1)
    assert fired(run) == {
        # Means of two evaluations: 0.6 after step 40, 0.35 at last. Training, over ten steps: to 10, to 40, to 60.
        "overfits": "evaluation_success fell from 0.6 (step 40) to 0.35 (step 60) while success went from 0.345 over "
        "0.645 to 0.845"
    }
    # Two standard errors of the difference at 0.55 and 128 episodes each are 2 sqrt(2 x 0.55 x 0.45 / 128) = 0.124.
    assert fired(held_out([0.3, 0.5, 0.6, 0.6, 0.5, 0.5], rising, tasks=64, samples=1)) == {}
    assert list(fired(held_out([0.3, 0.5, 0.6, 0.6, 0.5, 0.5], rising, tasks=64, samples=8))) == ["overfits"]
    assert fired(held_out([0.3, 0.5, 0.6, 0.6, 0.6, 0.6], rising)) == {}
    falling = noisy([0.9 - 0.01 * n for n in range(60)])  # training falls with it: that is another rule
    assert list(fired(held_out([0.9, 0.8, 0.7, 0.6, 0.5, 0.4], falling))) == ["reward_decline"]


def test_length_that_grows_for_nothing() -> None:
    length = [400 + 22 * n for n in range(51)]
    run = written({"response_tokens": length, "success": [0.40 + 0.0002 * n for n in range(51)]})
    # Means of the first five and of the last ten steps: 400 + 22 x 2, 400 + 22 x 45.5.
    assert fired(run) == {"length_grows": "response_tokens from 444 to 1401 (3.2 times) with success from 0.40 to 0.41"}
    assert fired(written({"response_tokens": length, "success": [0.4 + 0.004 * n for n in range(51)]})) == {}
    paid = {"reward_mean": [0.02 * n for n in range(51)], "reward_std": [0.3] * 51, "success": [0.4] * 51}
    assert list(fired(written({"response_tokens": length, "turns": length, **paid}))) == ["reward_hacking"]


def change_of(name: str, run: RunRecord) -> str:
    return {finding.rule.name: finding.change for finding in examine(run)}[name]


def test_advice_has_an_effect_in_the_runs_own_mode() -> None:
    waits = {"rollout_seconds": [9.0] * 10, "step_seconds": [10.0] * 10}
    assert change_of("trainer_waits", written(waits, rollout={"mode": "sync"})).startswith("rollout=streaming")
    streaming = change_of("trainer_waits", written(waits, rollout={"mode": "in_flight"}))
    assert "rollout=streaming" not in streaming and "rollout.max_in_flight above rollout.batch_size" in streaming
    padded = {"padding_share": [0.2] * 10}
    assert change_of("padding", written(padded, batching={"layout": "padded"})).startswith("batching.layout=packed")
    assert "batching.layout" not in change_of("padding", written(padded, batching={"layout": "packed"}))


def test_streaming_is_what_a_waiting_trainer_needs() -> None:
    """The same slow environment, recorded in mode sync and streaming."""
    assert change_of("trainer_waits", recorded("slow_environment")).startswith("rollout=streaming")
    assert "trainer_waits" not in fired(recorded("slow_environment_streaming"))


def test_the_first_thing_to_change_at_a_nan_is_the_advantages() -> None:
    run = written({"loss": [0.5] * 9 + [None]})
    (finding,) = examine(run)
    assert finding.rule.name == "not_finite"
    assert finding.rule.causes[0].startswith("advantages that are neither normalised nor clipped")
    order = ["algorithm.settings.normalise=true", "advantage.clip=3", "optimizer.learning_rate", "model.precision"]
    places = [finding.change.index(setting) for setting in order]
    assert places == sorted(places)


TRACEBACK = 'Traceback (most recent call last):\n  File "/home/me/my_task.py", line 12, in step\n    boom()\n'
ENDS = {  # rule -> what the logs of ranks 0 and 1 hold after their last start, and words of the evidence
    "device_out_of_memory": (
        f"{TRACEBACK}--- ended: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n",
        "--- ended: Preempted: stopped by SIGTERM\n",
        "rank 0: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (/home/me/my_task.py:12)",
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
        "rank 1: KeyError: 'prompt' (/home/me/my_task.py:12)",
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


def out_of_memory(folder: Path, said: str, *overrides: str, ranks: int = 8) -> str:
    """What the doctor says to change, of a run of the shipped configuration that ended so."""
    (folder / "logs").mkdir(parents=True)
    for rank in range(ranks):
        end = f"OutOfMemoryError: {said}" if rank == ranks - 1 else "RuntimeError: Connection closed by peer"
        (folder / "logs" / f"rank-{rank}.log").write_text(f"--- started: b\n--- ended: {end}\n")
    save(load("llama3_8b_32k", [f"output={folder}", "model.path=x", *overrides]), folder / "config.yaml")
    return change_of("device_out_of_memory", read_run(folder, may_be_empty=True))


def test_out_of_memory_is_answered_with_what_would_have_fitted(tmp_path: Path) -> None:
    """Llama 3 8B at 32k: the cheapest changes come first, the ones that prove needless are left out."""
    said = "CUDA out of memory. GPU 7 has a total capacity of 79.11 GiB of which 2.00 MiB is free."
    plain = ["parallel.tensor=1", "parallel.sequence=false"]
    change = out_of_memory(tmp_path / "a", said, *plain, "model.recompute=none")
    assert change.startswith(
        "`flashrl plan` counts 194.6 GiB for this run, of 72.8 usable on a GPU; what would have fitted: "
        "model.recompute=full (70.8 GiB). In general: batching.max_tokens_per_microbatch lower"
    )
    # On cards of 40 GiB the weights have to be cut as well: each of the eight then holds a part of a replica.
    small = said.replace("79.11", "39.39")
    change = out_of_memory(tmp_path / "b", small, *plain, "model.recompute=none")
    assert (
        "of 36.2 usable on a GPU; what would have fitted: model.recompute=full (70.8 GiB), parallel.tensor=" in change
    )
    # One card in fp32: no setting helps, more cards do.
    one = ["cluster.gpus_per_node=1", "model.precision=fp32"]
    change = out_of_memory(tmp_path / "c", said, *plain, *one, ranks=1)
    assert "no settings fit 32768 tokens on 1 of them; fewest GPUs that would have: 4 (1 node): TP 2, PP 1" in change
    # By the plan it fits, and yet it did not: nine tenths of what it counts.
    change = out_of_memory(tmp_path / "d", "CUDA out of memory.")
    assert "counts 26.1 GiB for this run, of 72.8 usable on a GPU; what would have fitted: parallel.tensor=8" in change
    # Nothing is known of the model.
    change = out_of_memory(tmp_path / "e", said, "model.hf_config={model_type: other}")
    assert change.startswith("batching.max_tokens_per_microbatch lower")


def test_a_run_that_ended_well_has_no_end_to_tell(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").write_text("--- started: a\n--- ended: done\n")
    assert examine(read_run(tmp_path, may_be_empty=True)) == []
    with pytest.raises(ValueError, match="holds no metrics.jsonl"):
        read_run(tmp_path)
