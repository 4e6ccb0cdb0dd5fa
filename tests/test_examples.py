"""The shipped examples do what they say."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from nemo_flashrl import environments
from nemo_flashrl.config import load, settings_of
from nemo_flashrl.environments.environment import Environment

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_my_environment_is_loaded_by_its_dotted_path(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    sys.modules.pop("my_environment", None)
    loaded = environments.load("my_environment.GuessTheNumber")
    settings = settings_of(loaded, {"largest": 10, "num_tasks": 3}, "environment")
    assert list(loaded.tasks(settings)) == [1, 10, 9]  # 7919 = 9 and 15838 = 8 modulo 10
    game = loaded(settings)
    assert isinstance(game, Environment)

    async def play() -> list:
        await game.reset(9)
        return [await game.step(text) for text in ("hm", "my guess is 3", "10", "it is 9")]

    silent, low, high, solved = asyncio.run(play())
    assert (silent.observation, low.observation, high.observation) == ("Say a number.", "higher", "lower")
    assert (solved.reward, solved.done, solved.success) == (1.0, True, True)
    with pytest.raises(ValueError, match="environment.settings.larget"):
        settings_of(loaded, {"larget": 5}, "environment")


def test_my_run_is_complete_and_the_one_that_the_page_shows() -> None:
    run = load(str(EXAMPLES / "my_run.yaml"))
    assert (run.output, run.model.path, run.algorithm.name) == ("runs/my_run", "warm_start", "flash_reinforce")
    settings_of(environments.load(run.environment.name), run.environment.settings, "environment")
    assert load(str(EXAMPLES / "my_run.yaml"), ["algorithm=grpo", "rollout=vllm"]).algorithm.name == "grpo"
    page = (EXAMPLES.parent / "docs" / "configuration.md").read_text()
    assert textwrap.indent((EXAMPLES / "my_run.yaml").read_text(), "    ") in page


def test_the_environment_of_the_readme_plays_an_episode(tmp_path: Path, monkeypatch) -> None:
    english, chinese = (
        re.findall(r"^```python\n(.*?)^```$", (EXAMPLES.parent / name).read_text(), re.M | re.S)
        for name in ("README.md", "README.zh.md")
    )
    assert len(english) == 1 and english == chinese
    (tmp_path / "readme_environment.py").write_text(english[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded = environments.load("readme_environment.GuessTheLetter")
    settings = settings_of(loaded, {"letters": "abcd"}, "environment")
    tasks = loaded.tasks(settings)
    assert (len(tasks), tasks[1]) == (4, "b")
    game = loaded(settings)
    assert isinstance(game, Environment)

    async def play() -> tuple[list, list]:
        prompt = await game.reset(tasks[1])
        answers = [await game.step(text) for text in ("a", "d", " b")]
        await game.close()
        return prompt, answers

    prompt, (low, high, solved) = asyncio.run(play())
    assert prompt == [{"role": "user", "content": "I think of one of abcd. Which is it?"}]
    assert (low.observation, high.observation) == ("a later one", "an earlier one")
    assert [(a.reward, a.done) for a in (low, high, solved)] == [(0.0, False), (0.0, False), (1.0, True)]


def test_my_environment_stays_short() -> None:
    assert len((EXAMPLES / "my_environment.py").read_text().splitlines()) < 60


def test_the_ablation_runs_each_technique_alone(tmp_path: Path) -> None:
    """Eight variants of two seeds; the warm starts are there already."""
    for seed in (0, 1):
        (tmp_path / "warm_start" / str(seed)).mkdir(parents=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [EXAMPLES / "ablation.sh", tmp_path, "2", "--plan"]
    done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True)
    first, *runs = done.stdout.splitlines()
    assert first == "16 runs of 60 steps"
    assert [line.split()[0] for line in runs[:8]] == [
        "baseline",
        "advantage.clip=3",
        "advantage.clip=1",
        "algorithm.settings.normalisation=quantile",
        "algorithm.settings.normalisation=none",
        "rollout.temperature=0.85",
        "rollout.temperature_schedule=[[0,1.0],[0.25,0.85]]",
        "kl.schedule=annealed",
    ]
    assert [line.split()[2] for line in runs] == ["0"] * 8 + ["1"] * 8
