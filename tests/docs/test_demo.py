"""The demo's environment and its evaluation; tests/real_weights trains with it."""

from __future__ import annotations

import asyncio
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from real_models import DEMO

from nemo_flashrl import environments
from nemo_flashrl.config import load, settings_of
from nemo_flashrl.environments.environment import Environment
from nemo_flashrl.rollout.from_config import held_out_tasks


def calculator() -> tuple[type[Environment], object]:
    """As the demo's configuration finds it: beside it."""
    config = load(str(DEMO / "demo.yaml"))
    environment = environments.load(config.environment.name)
    return environment, settings_of(environment, config.environment.settings, "environment")


def play(*actions: str) -> list:
    """Of 384 plus 77, minus 500, times 3."""
    environment, settings = calculator()
    account = sys.modules["calculator"].Account(384, (("+", 77), ("-", 500), ("*", 3)))
    assert (str(account), account.values()) == ("384, plus 77, minus 500, times 3", [384, 461, -39, -117])
    assert account.calls() == ["calc(384 + 77)", "calc(461 - 500)", "calc(-39 * 3)"]

    async def whole() -> list:
        game = environment(settings)
        assert isinstance(game, Environment)
        assert (await game.reset(account))[-1] == {"role": "user", "content": "384 plus 77"}
        answers = [await game.step(action) for action in actions]
        await game.close()
        return answers

    return asyncio.run(whole())


def test_an_account_that_is_kept_right_earns_1_at_its_end() -> None:
    first, second, end = play(" calc(384 + 77)\n", "calc(461 - 500)", "calc(-39 * 3)")
    assert [(a.observation, a.reward, a.done) for a in (first, second)] == [
        ("461 minus 500", 0.0, False),
        ("-39 times 3", 0.0, False),
    ]
    assert (end.reward, end.done, end.success, end.info) == (1.0, True, True, {"outcome": "right", "calls": 3})


def test_a_wrong_call_changes_what_follows() -> None:
    first, _, end = play("calc(384 - 77)", "calc(307 - 500)", "calc(-193 * 3)")
    assert first.observation == "307 minus 500"
    assert (end.reward, end.done, end.success, end.info) == (0.0, True, False, {"outcome": "wrong", "calls": 3})


@pytest.mark.parametrize(
    "action", ["461", "calc(384 + 77) = 461", "calc(384+77)", "calc(384 / 77)", "calc(1 + -2)", ""]
)
def test_what_is_no_call_ends_the_episode(action: str) -> None:
    (end,) = play(action)
    assert (end.reward, end.done, end.malformed, end.info["outcome"]) == (0.0, True, True, "no_call")


def test_held_out_tasks_are_others() -> None:
    config = load(str(DEMO / "demo.yaml"), list(runpy.run_path(str(DEMO / "held_out.py"))["HELD_OUT"]))
    environment, settings = calculator()
    _, held_out = held_out_tasks(config, environment)
    tasks = environment.tasks(settings)
    assert len(held_out) == len(set(held_out)) == 200
    assert not set(held_out) & {tasks[index] for index in range(5000)}
    assert tasks[7] == environment.tasks(settings)[7]


def test_the_interval_is_wilsons() -> None:
    """50 of 200 and 200 of 200, computed by hand: n / (n + z^2) is the upper one's lower end."""
    wilson = runpy.run_path(str(DEMO / "held_out.py"))["wilson"]
    assert wilson(50, 200) == pytest.approx((0.1951, 0.3143), abs=1e-4)
    assert wilson(200, 200) == pytest.approx((200 / (200 + 1.959964**2), 1.0), abs=1e-9)


def test_the_comparison_shows_both(tmp_path: Path) -> None:
    """Of a run whose exported folder is not there: everything up to the last lines, which load it."""
    answer = {"task": "3, plus 4", "right": ["calc(3 + 4)"], "outcome": "right", "calls": 1}
    for name, said, solved in (("before", "7", False), ("after", "calc(3 + 4)", True)):
        lines = [{**answer, "said": [said], "solved": solved}] * 12
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"seconds": 1}]))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "success": 0.5, "policy_tokens": 90, "step_seconds": 2.0}\n')
    command = [sys.executable, DEMO / "held_out.py", "compare", tmp_path / "before.jsonl", tmp_path / "after.jsonl"]
    done = subprocess.run([*command, "--run", tmp_path], capture_output=True, text=True, timeout=120)
    assert done.stdout.count("wrong  '7'") == done.stdout.count("right  'calc(3 + 4)'") == 10
    assert "before  0.0% [0.0%, 24.2%]" in done.stdout and "after   100.0% [75.8%, 100.0%]" in done.stdout


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    convert = runpy.run_path(str(DEMO / "convert.py"))["convert"]
    with pytest.raises(FileNotFoundError, match="make models"):
        convert(tmp_path, tmp_path / "model")
