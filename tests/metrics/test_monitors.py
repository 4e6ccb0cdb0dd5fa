"""What a run watches about itself, and settings that hide each other."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter

import numpy as np
import pytest
import torch
from paths import ROOT
from processes import run_ranks
from tiny import random_trajectories

from nemo_flashrl.algorithms.advantages import group_advantages
from nemo_flashrl.algorithms.flash_reinforce import FlashReinforce, FlashReinforceSettings
from nemo_flashrl.algorithms.grpo import Grpo, GrpoSettings
from nemo_flashrl.config import load, settings_of
from nemo_flashrl.environments.key_value_store import KeyValueStore
from nemo_flashrl.metrics.monitors import RULES, Monitors
from nemo_flashrl.metrics.step import group_metrics, trajectory_metrics
from nemo_flashrl.metrics.table import from_machine
from nemo_flashrl.preflight.conflicts import (
    beyond_bounds,
    changed_settings,
    conflict_table,
    report_conflicts,
    settings_without_effect,
)
from nemo_flashrl.rollout.from_config import prompt_source
from nemo_flashrl.run.folder import EXIT_MONITOR
from nemo_flashrl.run.jsonl import read_json_lines

CALM = {"group_advantage_std": 1.0, "loss": -0.5, "response_tokens": 20.0, "success": 0.5, "reward_mean": 2.0}
OVER_TEN_STEPS = ("length_trend", "success_drop", "reward_drop")  # of these a mean is what is limited


def feed(monitors: Monitors, *steps: dict) -> list[dict]:
    return [monitors.see({"step": number, **step}) for number, step in enumerate(steps, 1)]


def test_jumps_and_spikes_are_multiples_of_the_median_before() -> None:
    monitors = Monitors({"patience": 1})
    spreads = [1.0, 1.0, 2.0, 4.0, 2.0, 6.0]  # the median of the first five is 2
    seen = feed(monitors, *({**CALM, "group_advantage_std": s, "loss": -s} for s in spreads))
    assert [s.get("advantage_jump") for s in seen] == [None] * 5 + [3.0]
    assert seen[-1]["loss_spike"] == 3.0
    assert seen[-1]["length_trend"] == 1.0
    assert monitors.reason == ""  # every limit is off
    lengths = Monitors({"patience": 1})
    seen = feed(lengths, *({**CALM, "response_tokens": n} for n in [10.0] * 10 + [30.0] * 5))
    assert seen[-1]["length_trend"] == 2.0  # (5 * 10 + 5 * 30) / 10 over 10
    seen = feed(Monitors({}), *[CALM] * 5, {**CALM, "loss": None})
    assert math.isinf(seen[-1]["loss_spike"])  # what is no number is beyond every limit


def test_a_drop_is_measured_from_the_best_ten_steps() -> None:
    seen = feed(Monitors({}), *({"success": s, "reward_mean": 10 * s} for s in [0.2] * 5 + [0.8] * 10 + [0.3] * 4))
    drops = [step.get("success_drop") for step in seen]
    assert drops[:9] == [None] * 9
    assert drops[9:15] == pytest.approx([0.0] * 6)  # it rises
    assert drops[15:] == pytest.approx([0.05, 0.1, 0.15, 0.2])  # (0.8 - 0.3) / 10 a step
    assert seen[-1]["reward_drop"] == pytest.approx(2.0)
    unknown = feed(Monitors({}), *[{"success": 0.8}] * 10, {"success": None}, {"success": 0.3})
    assert [step.get("success_drop") for step in unknown[9:]] == pytest.approx([0.0, 0.0, 0.05])


BAD = {
    "advantage_jump": (2.0, {**CALM, "group_advantage_std": 3.0}, {**CALM, "group_advantage_std": 1.9}),
    "unique_samples": (0.6, {**CALM, "unique_sample_share": 0.5}, {**CALM, "unique_sample_share": 0.7}),
    "distinct_answers": (2.0, {**CALM, "group_distinct_answers": 1.0}, {**CALM, "group_distinct_answers": 2.0}),
    "effective_fraction": (0.3, {**CALM, "effective_fraction": 0.2}, {**CALM, "effective_fraction": 0.4}),
    "entropy": (0.1, {**CALM, "sampled_entropy": 0.05}, {**CALM, "sampled_entropy": 0.2}),
    "length_trend": (1.2, {**CALM, "response_tokens": 100.0}, {**CALM, "response_tokens": 21.0}),
    "repeated_tokens": (0.3, {**CALM, "repeated_token_share": 0.4}, {**CALM, "repeated_token_share": 0.2}),
    "loss_spike": (4.0, {**CALM, "loss": 3.0}, {**CALM, "loss": 1.0}),
    "success_drop": (0.04, {**CALM, "success": 0.0}, CALM),  # 0.5 / 10 a step
    "reward_drop": (0.4, {**CALM, "reward_mean": -3.0}, CALM),
}


@pytest.mark.parametrize("field", [rule.field for rule in RULES])
def test_a_limit_stops_after_as_many_steps_in_a_row(field: str) -> None:
    limit, bad, good = BAD[field]
    steps = 12 if field in OVER_TEN_STEPS else 6  # a trend of ten steps is told from the eleventh on
    calm = [good if field not in ("advantage_jump", "length_trend", "loss_spike") else CALM] * steps
    monitors = Monitors({"patience": 2, field: limit})
    feed(monitors, *calm, bad, *[good, bad] * (field not in OVER_TEN_STEPS))  # a mean over ten steps carries it on
    assert monitors.reason == ""  # never two in a row
    monitors = Monitors({"patience": 2, field: limit})
    feed(monitors, *calm, bad, bad)
    assert f"monitors.{field}={limit:g} for 2 consecutive steps, up to step {steps + 2}; change: " in monitors.reason
    off = Monitors({"patience": 2, field: None})
    feed(off, *calm, bad, bad)
    assert off.reason == ""
    again = Monitors({"patience": 2, field: limit})  # a run that goes on: the steps behind it count, and stop nothing
    again.replay({"step": n, **record} for n, record in enumerate([*calm, bad], 1))
    assert again.reason == ""
    again.see({"step": steps + 2, **bad})
    assert again.reason == monitors.reason


def test_few_unique_samples_are_told_once(caplog) -> None:
    monitors = Monitors({"patience": 1})
    with caplog.at_level(logging.WARNING):
        feed(monitors, {**CALM, "unique_sample_share": 0.7}, *[{**CALM, "unique_sample_share": 0.5}] * 3)
    assert [r.getMessage()[:45] for r in caplog.records] == ["step 2: 50% of a group's samples are unique ("]
    assert monitors.reason == ""


def test_numbers_that_monitors_look_at() -> None:
    group = random_trajectories(4, 131, group_size=4)
    same = [group[0], group[0], group[1], group[2]]
    assert group_metrics([t.__class__(**{**_fields(t), "group": 0}) for t in same], [1.0] * 4)[
        "group_distinct_answers"
    ] == len({_last(t) for t in same})
    metrics = trajectory_metrics(group, 0)
    tokens = np.concatenate([t.behavior_logprobs[t.action_mask] for t in group])
    assert metrics["sampled_entropy"] == pytest.approx(-tokens.mean(), rel=1e-5)


def _fields(trajectory) -> dict:
    return {name: getattr(trajectory, name) for name in trajectory.__dataclass_fields__}


def _last(trajectory) -> bytes:
    from nemo_flashrl.metrics.repetition import last_action

    return last_action(trajectory).tobytes()


def config_of(*overrides: str):
    return load("rehearsal", ["output=x", "model.path=x", *overrides])


def test_two_of_the_four_are_told_with_what_they_move(capsys) -> None:
    grpo = Grpo(GrpoSettings(group_size=16, normalisation="none"))
    one = config_of("rollout.temperature=0.9")
    assert conflict_table(changed_settings(one, FlashReinforce())) == ""
    assert conflict_table(changed_settings(config_of(), Grpo(GrpoSettings(group_size=16)))) == ""
    mixed = config_of("rollout.temperature=0.9", "curriculum.classes=hops", "curriculum.mixture.1=1")
    table = conflict_table(changed_settings(mixed, FlashReinforce()))
    assert "temperature and curriculum all move" in table and "curriculum.mixture   {'1': 1.0}" in table
    both = config_of("rollout.temperature_schedule=[[0,1],[0.5,0.9]]", "curriculum.mode=adaptive", "group_size.every=4")
    table = conflict_table(changed_settings(both, grpo))
    assert table.startswith("group size and temperature and normalisation and curriculum all move the distribution")
    for words in (
        r"algorithm.settings.group_size     16 ", "group_size.every ", "[[0, 1], [0.5, 0.9]]", "curriculum.mode",
        "algorithm.settings.normalisation  none", "z_score", "which prompts come",
    ):  # fmt: skip
        assert words in table, table
    report_conflicts(both, grpo, shown=True)
    assert table in capsys.readouterr().err
    report_conflicts(both, grpo, shown=False)
    assert capsys.readouterr().err == ""
    strict = config_of("rollout.temperature=0.9", "trainer.strict=true")
    report_conflicts(strict, FlashReinforce(), shown=True)  # one alone is nobody's enemy
    with pytest.raises(
        ValueError, match="trainer.strict=True: rollout.temperature=0.9, algorithm.settings.normalise=Tr"
    ):
        report_conflicts(strict, FlashReinforce(FlashReinforceSettings(normalise=True)), shown=True)


IDLE = {  # a setting -> what it is without
    "kl.schedule=annealed": "kl.coefficient=0.0: set kl.coefficient above 0, or leave kl.schedule out",
    "kl.target=0.1": "kl.schedule=fixed: set kl.schedule adaptive, or leave kl.target out",
    "reference.beta=0.9": "reference.mode=none: set reference.mode ema, or leave reference.beta out",
    "curriculum.floor=0.1": "curriculum.mode=none: set curriculum.mode adaptive, or leave curriculum.floor out",
    "curriculum.threshold=0.1": (
        "curriculum.rule=variance: set curriculum.rule threshold, or leave curriculum.threshold out"
    ),
    "length_penalty.novelty=sentences": (
        "length_penalty.unit=tokens: set length_penalty.unit new_tokens, or leave length_penalty.novelty out"
    ),
    "length_penalty.similarity=0.8": (
        "length_penalty.novelty=ngrams: set an embedder, or leave length_penalty.similarity out"
    ),
    "curriculum.classes=hops": (
        "curriculum.mode=none: set curriculum.mode adaptive, a curriculum.mixture or evaluation.every_steps"
    ),
    "lora.alpha=8": "lora.rank=0: set lora.rank above 0, or leave lora.alpha out",
}


@pytest.mark.parametrize("override", IDLE)
def test_a_setting_that_nothing_reads_is_told(override: str, capsys) -> None:
    (line,) = settings_without_effect(config_of(override))
    assert line.startswith(override.partition("=")[0]) and line.endswith(IDLE[override])
    report_conflicts(config_of(override), FlashReinforce(), shown=True)
    assert capsys.readouterr().err == f"{line}\n"
    with pytest.raises(ValueError, match="trainer.strict=True: .* has no effect with"):
        report_conflicts(config_of(override, "trainer.strict=true"), FlashReinforce(), shown=False)


def test_a_setting_that_is_read_is_not_told() -> None:
    assert settings_without_effect(config_of()) == []
    on = ("kl.coefficient=0.01", "kl.schedule=adaptive", "kl.target=0.1", "reference.mode=ema", "reference.beta=0.9")
    assert settings_without_effect(config_of(*on, "kl.estimator=k2", "rollout.temperature=0.9")) == []
    for other in ("curriculum.mixture.1=1", "evaluation.every_steps=5", "curriculum.mode=adaptive"):
        assert settings_without_effect(config_of("curriculum.classes=hops", other)) == []
    both = config_of("rollout.temperature=0.9", "rollout.temperature_schedule=[[0,1],[0.5,0.9]]")
    assert settings_without_effect(both)[0].startswith("rollout.temperature=0.9 has no effect with")


def test_a_mixture_on_the_command_line_names_the_classes_of_the_tasks() -> None:
    """As docs/schedules.md has it; 1, 2 and 3 hops, the last drawn four times as often as the first."""
    page = (ROOT / "docs/schedules.md").read_text()
    words = next(line for line in page.splitlines() if "curriculum.mixture.1=" in line).split()
    config = config_of(*words[words.index("curriculum.classes=hops") :], "environment.settings.num_tasks=50")
    settings = KeyValueStore.Settings(num_tasks=50)
    source = prompt_source(config, KeyValueStore.tasks(settings))
    assert source.shares.tolist() == pytest.approx([1 / 7, 2 / 7, 4 / 7])
    config.curriculum.mixture["4"] = 1.0
    with pytest.raises(ValueError, match=r"curriculum.mixture names \['1', '2', '3', '4'\]: the tasks' classes are"):
        prompt_source(config, KeyValueStore.tasks(settings))


def test_techniques_of_different_rooms_are_no_conflict() -> None:
    config = config_of(
        "reference.mode=ema", "kl.coefficient=0.01", "selection.tokens=code", "advantage.clip=3",
        "length_penalty.coefficient=0.1", "length_penalty.limit=4", "trainer.strict=true",
    )  # fmt: skip
    report_conflicts(config, Grpo(GrpoSettings(normalisation="quantile")), shown=True)


BEYOND = {  # overrides -> how the line begins
    "reference.mode=ema kl.coefficient=0.05": "kl.coefficient=0.05: from 0.05 on it locks the policy",
    "reference.mode=ema kl.coefficient=0.001": "kl.coefficient=0.001: at 0.001 or less it holds nothing",
    "algorithm=grpo algorithm.settings.group_size=4": "algorithm.settings.group_size=4: advantages of so few rollouts",
    "algorithm=grpo algorithm.settings.group_size=32": "algorithm.settings.group_size=32: a batch holds 2 prompts",
    "algorithm=grpo reference.mode=ema kl.coefficient=0.1 kl.place=reward": "kl.place=reward with normalisation",
    "algorithm=grpo algorithm.settings.normalisation=quantile environment.name=reasoning_gym": (
        "normalisation=quantile with environment.name=reasoning_gym: only ranks count"
    ),
    "selection.tokens=code": "selection.tokens=code with environment.name=key_value_store: its prompts ask for no ```",
}
WITHIN = [
    "reference.mode=ema kl.coefficient=0.049",
    "reference.mode=ema kl.coefficient=0.0011",
    "reference.mode=ema kl.coefficient=0.05 kl.place=reward",  # of a trajectory's mean KL
    "algorithm=grpo algorithm.settings.group_size=4 reference.mode=ema kl.coefficient=0.01",
    "algorithm=grpo algorithm.settings.group_size=5",
    "algorithm=grpo algorithm.settings.group_size=16",
    "algorithm=grpo algorithm.settings.normalisation=none reference.mode=ema kl.coefficient=0.1 kl.place=reward",
    "algorithm=grpo algorithm.settings.normalisation=quantile",  # rewards 0 and 1
    "selection.tokens=code environment.name=mine.Fenced",
]


def bounds_of(overrides: str) -> list[str]:
    config = config_of(*overrides.split(" "))
    plugin = Grpo if config.algorithm.name == "grpo" else FlashReinforce
    return beyond_bounds(config, plugin(settings_of(plugin, config.algorithm.settings, "algorithm")))


@pytest.mark.parametrize("overrides", BEYOND)
def test_a_setting_beyond_its_bound_is_told(overrides: str) -> None:
    (line,) = bounds_of(overrides)
    assert line.startswith(BEYOND[overrides])


@pytest.mark.parametrize("overrides", WITHIN)
def test_a_setting_within_its_bounds_is_not(overrides: str) -> None:
    assert bounds_of(overrides) == []


def test_a_bound_is_printed_and_stops_nothing(capsys) -> None:
    config = config_of("reference.mode=ema", "kl.coefficient=0.05", "trainer.strict=true")
    report_conflicts(config, FlashReinforce(), shown=False)
    assert capsys.readouterr().err == ""
    report_conflicts(config, FlashReinforce(), shown=True)
    assert capsys.readouterr().err.startswith("warning: kl.coefficient=0.05: from 0.05 on it locks the policy")


def test_a_small_score_among_zeros_by_normalisation() -> None:
    """Why quantile is warned of: q - 1/2 = 0.375 is 2 q - 1 = 0.75 here, whatever the score."""
    groups = torch.zeros(4, dtype=torch.int64)
    for score in (0.1, 1.0):
        rewards = torch.tensor([0.0, 0.0, 0.0, score])
        assert group_advantages(rewards, groups, normalisation="quantile")[3].item() == 2 * 0.375
        assert group_advantages(rewards, groups, normalisation="none")[3].item() == pytest.approx(0.75 * score)
        assert group_advantages(rewards, groups)[3].item() == pytest.approx(1.5, rel=1e-4)  # 3 / sqrt(4)


def test_a_reached_limit_ends_the_run_with_a_checkpoint(warm_start, tmp_path) -> None:
    """Grouped rollouts at a temperature near 0 say the same; the run stops at step 2 and goes on when told to.

    Temperature, group size and curriculum move all the while: what goes on is what a run in one go does.
    """
    run = tmp_path / "run"
    settings = [
        f"model.path={warm_start}", "algorithm=grpo", "trainer.steps=4", "rollout.batch_size=16",
        "rollout.temperature_schedule=[[0,0.05],[0.5,0.1]]", "environment.settings.num_tasks=40",
        "curriculum.mode=adaptive", "curriculum.classes=hops", "curriculum.share=0.75", "group_size.every=3",
    ]  # fmt: skip
    limits = ["monitors.unique_samples=0.9", "monitors.patience=2"]
    said = run_ranks(1, "training", "rehearsal", f"output={run}", *settings, *limits, exit_codes=(EXIT_MONITOR,))
    assert "stopped by monitors after step 2 of 4: unique_sample_share=" in said
    assert "is below monitors.unique_samples=0.9 for 2 consecutive steps" in said
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step=2"]
    assert not (run / "preempted").exists() and not (run / "checkpoint").exists()  # no requeue, no export
    run_ranks(1, "training", "rehearsal", f"output={run}", *settings)
    straight = tmp_path / "straight"
    run_ranks(1, "training", "rehearsal", f"output={straight}", *settings, "checkpoint.every_steps=0")
    lines, right = (
        [{k: v for k, v in line.items() if not from_machine(k)} for line in read_json_lines(folder / "metrics.jsonl")]
        for folder in (run, straight)
    )
    assert lines == right
    assert [(line["step"], line["temperature"]) for line in lines] == [(1, 0.05), (2, 0.05), (3, 0.1), (4, 0.1)]
    assert [line["group_size"] for line in lines] == [8, 8, 8, 4]  # told by three steps, two of them before the stop
    assert (
        lines[2]["curriculum_share_3"]
        != lines[3]["curriculum_share_3"]
        == pytest.approx(lines[0]["curriculum_share_3"])
    )


def test_each_class_of_tasks_is_told_of_in_a_run(warm_start, tmp_path) -> None:
    """The key-value store at three depths: the document's rule in steps 1 and 2, then the fixed mixture.

    What a step tells are the shares by which the next prompts are drawn, from the success that it tells beside them.
    """
    run = tmp_path / "run"
    run_ranks(
        1, "training", "rehearsal", f"output={run}", f"model.path={warm_start}", "trainer.steps=4",
        "rollout.batch_size=32", "environment.settings.num_tasks=90", "checkpoint.every_steps=0",
        "curriculum.mode=adaptive", "curriculum.rule=threshold", "curriculum.threshold=0.45", "curriculum.share=0.5",
        "curriculum.classes=hops", "curriculum.mixture.1=1", "curriculum.mixture.2=1", "curriculum.mixture.3=2",
        "evaluation.every_steps=2",
        "evaluation.settings.seed=99", "evaluation.tasks=30", "length_penalty.coefficient=0.01",
        "length_penalty.limit=30", "length_penalty.unit=new_tokens", "length_penalty.novelty=sentences",
    )  # fmt: skip
    lines = list(read_json_lines(run / "metrics.jsonl"))
    share, success, held_out = (
        [[line.get(f"{what}_{hops}") for hops in (1, 2, 3)] for line in lines]
        for what in ("curriculum_share", "curriculum_success", "evaluation_success")
    )
    assert share[0] == pytest.approx([0.25, 0.25, 0.5])  # nothing is known: 1/2 of each is above the threshold
    wanted = [m * max(0.0, 0.45 - p) for m, p in zip((0.25, 0.25, 0.5), success[1], strict=True)]
    assert share[1] == pytest.approx([0.2 * m + 0.8 * w / sum(wanted) for m, w in zip(share[0], wanted, strict=True)])
    gained = [now / before for now, before in zip(share[1], share[0], strict=True)]
    assert gained.index(max(gained)) == success[1].index(min(success[1])) and max(gained) > 1.1 > 0.9 > min(gained)
    assert share[2] == share[3] == pytest.approx([0.25, 0.25, 0.5])
    assert held_out[0] == held_out[2] == [None] * 3
    counts = Counter(task.hops for task in KeyValueStore.tasks(KeyValueStore.Settings(seed=99, num_tasks=30)))
    for line, own in zip(lines[1::2], held_out[1::2], strict=True):
        mean = sum(counts[hops] * rate for hops, rate in zip((1, 2, 3), own, strict=True)) / 30
        assert mean == pytest.approx(line["evaluation_success"])
    for line in lines:  # a `get` of the same key twice says nothing new
        rows = [r for r in read_json_lines(run / "trajectories.jsonl") if r["step"] == line["step"]]
        assert line["new_tokens"] == pytest.approx(sum(row["new_tokens"] for row in rows) / 32)
        assert 0 < line["new_tokens"] <= line["response_tokens"]
    assert any(line["new_tokens"] < line["response_tokens"] for line in lines)


def test_techniques_of_different_rooms_train_together(warm_start, tmp_path) -> None:
    """Reference, token mask, normalisation with clip, length penalty; beside them what moves over the run."""
    run = tmp_path / "run"
    run_ranks(
        1, "training", "rehearsal", f"output={run}", f"model.path={warm_start}", "algorithm=grpo", "trainer.steps=3",
        "rollout.batch_size=16", "environment.settings.num_tasks=40", "checkpoint.every_steps=0",
        "algorithm.settings.normalisation=quantile", "advantage.clip=0.5", "reference.mode=ema", "reference.beta=0.9",
        "kl.coefficient=0.01", "kl.schedule=annealed", "selection.malformed=leave_out",
        "length_penalty.coefficient=0.1", "length_penalty.unit=turns", "length_penalty.limit=1",
        "rollout.temperature_schedule=[[0,1.0],[0.5,0.85]]", "curriculum.mode=adaptive", "curriculum.classes=hops",
        "group_size.every=1", "group_size.threshold=0",
    )  # fmt: skip
    lines = list(read_json_lines(run / "metrics.jsonl"))
    assert [line["temperature"] for line in lines] == pytest.approx([1.0, 1.0, 0.85])
    assert lines[0]["group_size"] == 8 and lines[-1]["group_size"] == 16
    assert all(line["logprob_difference_max"] < 1e-4 for line in lines)  # the head knows the temperature
    assert all(0 < line["curriculum_share_3"] < 1 for line in lines)
    advantages = [r["advantage"] for r in read_json_lines(run / "trajectories.jsonl") if r["advantage"] is not None]
    assert max(map(abs, advantages)) == 0.5  # the clip
    assert {"kl", "length_penalty", "length_trend"} <= lines[-1].keys()
    assert all(line["effective_fraction"] == line["effective_samples"] / 16 for line in lines)
    assert json.dumps(lines[-1]["total_trajectories_trained"]) == "32.0"
