"""`flashrl doctor rewards` and `flashrl doctor groups`: numbers by hand, then the real thing on a tiny policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tiny import random_trajectories

from nemo_flashrl.cli import main
from nemo_flashrl.config import load
from nemo_flashrl.doctor.before_run import (
    LENGTH,
    as_table,
    findings,
    group_findings,
    group_table,
    outliers,
    reward_terms,
    shown_texts,
    summarize,
)
from nemo_flashrl.run.jsonl import append_json_line, append_json_lines


def row(reward: float, tokens: int = 10, turns: int = 1, share: float = 0.0, **shaping: float) -> dict:
    return {
        "reward": reward, "action_tokens": tokens, "turns": turns, "repeated_token_share": share, "shaping": shaping
    }  # fmt: skip


def config_of(*overrides: str):
    return load("rehearsal", ["output=x", "model.path=x", *overrides])


def test_terms_count_as_in_the_first_step() -> None:
    rows = [row(1.0, 30, polite=2.0, brief=1.0), row(0.0, 10, brief=3.0)]
    config = config_of(
        "advantage.shaping={polite: 0.1}", "length_penalty.coefficient=0.5", "length_penalty.limit=10",
        "length_penalty.decay_steps=5",
    )  # fmt: skip
    terms = {name: values.tolist() for name, values in reward_terms(rows, config).items()}
    assert terms == {
        "reward": [1.0, 0.0],
        "shaping.brief (not used)": [1.0, 3.0],
        "shaping.polite": [0.2, 0.0],
        "length penalty": [-1.0, 0.0],  # 0.5 * (30 / 10 - 1)
        LENGTH: [30.0, 10.0],
    }
    new = config_of("length_penalty.coefficient=1", "length_penalty.limit=10", "length_penalty.unit=new_tokens")
    assert reward_terms([row(0, 40, share=0.5)], new)["length penalty"].tolist() == [-1.0]  # 20 new tokens
    measured = row(0, 40, share=0.5) | {"new_tokens": 30}
    assert reward_terms([measured], new)["length penalty"].tolist() == [-2.0]


def test_outliers_by_hand() -> None:
    assert outliers(np.array([0.0] * 20 + [100.0])) == [20]
    assert outliers(np.array([0.0] * 18 + [1.0] * 2)) == []  # a tenth is solved: that is no outlier
    assert outliers(np.arange(8.0)) == []
    assert outliers(np.array([*range(8), -30, 100.0])) == [9, 8]
    assert outliers(np.ones(5)) == []


def test_a_summary_by_hand() -> None:
    own = summarize("reward", np.array([0.0, 0.0, 1.0, 3.0]), np.array([1.0, 1.0, 2.0, 4.0]))
    assert (own.mean, own.median, own.lowest, own.highest) == (1.0, 0.5, 0.0, 3.0)
    assert own.std == pytest.approx(1.5**0.5)  # (1 + 1 + 0 + 4) / 4
    assert own.with_length == pytest.approx(1.0)
    assert len(own.histogram) == 12 and own.histogram[0] == "█"
    assert np.isnan(summarize("r", np.ones(3), np.arange(3.0)).with_length)


def test_what_is_wrong_with_a_reward_is_told() -> None:
    config = config_of("advantage.shaping={polite: 10.0}")
    sound = reward_terms([row(i % 2, 10 + i // 2 % 3, polite=0.01 * (i % 5)) for i in range(60)], config)
    assert findings(sound) == []
    assert "from min to max" in as_table(sound) and "shaping.polite" in as_table(sound)
    flat = findings(reward_terms([row(0.5)] * 4, config))
    assert flat == ["reward is 0.5 on every sample: every advantage is 0, no gradient"]
    long = findings(reward_terms([row(i, 10 * i) for i in range(6)], config))
    assert long == ["reward correlates with length by +1.00: it rewards length, not the task"]
    loud = findings(reward_terms([row(i % 2, polite=float(i // 2 % 2)) for i in range(40)], config))
    assert loud == ["shaping.polite varies more than the reward (5 against 0.5): it dominates"]
    far = findings(reward_terms([row(0.0)] * 20 + [row(100.0)], config))
    assert far == [
        "reward has 1 outlier(s), the largest 100 at sample 20, with a median of 0: clip it, or "
        "algorithm.settings.normalisation=quantile"
    ]


def test_groups_that_say_the_same_are_told() -> None:
    one, other = random_trajectories(2, 131)

    def group(number: int, members, rewards):
        return [
            replace(t, prompt_index=number, group=number, reward=r, failed=r == 0)
            for t, r in zip(members, rewards, strict=True)
        ]

    trajectories = [*group(0, [one, one, one, other], [1.0, 0.0, 0.0, 0.0]), *group(1, [one] * 4, [0.0] * 4)]
    table = group_table(trajectories, 4).splitlines()
    assert table[1].split() == ["0", "0.25", "0.25", "0.43", "0.50", "2", "of", "4"]
    assert table[2].split() == ["1", "0.00", "0", "0.00", "0.25", "1", "of", "4"]
    assert table[3].startswith("all: pass@1 0.12 pass@4 0.50; tied groups 0.50, std in a group 0.22, unique 0.38")
    assert [f[:45] for f in group_findings(trajectories)] == ["38% of a group's rollouts are unique (under 6"]
    assert "easier tasks" in group_findings(group(1, [one, other] * 2, [0.0] * 4))[-1]
    assert "harder tasks" in group_findings(group(1, [one, other] * 2, [1.0] * 4))[-1]


def test_the_first_rollouts_are_shown_as_texts() -> None:
    """Tokens are letters here; of each rollout those that the policy sampled stand in brackets."""

    class Letters:
        def decode(self, ids: list[int]) -> str:
            return "".join(chr(ord("a") + number) for number in ids)

    mask = np.array([False, True, True, False])
    said = replace(
        random_trajectories(1, 131)[0],
        token_ids=np.arange(4), action_mask=mask, behavior_logprobs=np.zeros(4), versions=np.zeros(4, int),
        prompt_index=4, reward=0.5, failed=True, turns=1, end_reason="turn_limit",
    )  # fmt: skip
    assert shown_texts([said, replace(said, failed=False)], Letters()).split("\n\n") == [
        "--- 1: prompt 4, reward 0.5, not solved, 2 tokens sampled in 1 turns, end: turn_limit\na [bc] d",
        "--- 2: prompt 4, reward 0.5, solved, 2 tokens sampled in 1 turns, end: turn_limit\na [bc] d",
    ]


def test_the_commands_sample_with_the_real_policy(warm_start, tmp_path, capsys) -> None:
    base = ["rehearsal", f"model.path={warm_start}", "environment.settings.num_tasks=100"]
    assert main(["doctor", "rewards", *base, "--samples", "40"]) in (0, 1)
    text = capsys.readouterr().out
    assert "40 samples of the starting policy" in text and "\nreward " in text and LENGTH in text
    assert main(["doctor", "groups", *base, "algorithm=grpo", "--prompts", "5", "--show", "20"]) in (0, 1)
    text = capsys.readouterr().out
    assert text.startswith("8 rollouts of 5 prompts at temperature 1\n") and "of 8" in text
    assert [line.split(":")[0] for line in text.splitlines() if line[:4] == "--- "] == [
        f"--- {n}" for n in range(1, 21)
    ]
    assert "--- 9: prompt 1, reward " in text and " [get ( k " in text
    few = [*base, "environment.settings.num_tasks=3", "--samples", "10"]  # over more than three epochs
    assert main(["doctor", "rewards", *few]) in (0, 1)
    assert "10 samples of the starting policy" in capsys.readouterr().out
    cold = main(["doctor", "groups", *base, "rollout.temperature=0.01", "--prompts", "5", "--samples", "4"])
    assert cold == 1 and "rollouts are unique (under 60%)" in capsys.readouterr().out

    append_json_line(tmp_path / "metrics.jsonl", {"step": 1})
    append_json_lines(tmp_path / "trajectories.jsonl", [row(0.5)] * 3)
    assert main(["doctor", "rewards", *base, "--from-run", str(tmp_path)]) == 1
    assert f"3 samples of {tmp_path}" in capsys.readouterr().out
    assert main(["doctor", "groups"]) == 2
    assert "write ./groups" in capsys.readouterr().err
