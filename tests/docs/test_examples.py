"""The shipped examples do what they say."""

from __future__ import annotations

import asyncio
import json
import os
import re
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from paths import ROOT
from processes import run_ranks
from safetensors.torch import load_file
from tiny import write_model
from transformers import AutoModelForCausalLM

from nemo_flashrl import environments, ops
from nemo_flashrl.config import load, settings_of
from nemo_flashrl.environments.environment import Environment

EXAMPLES = ROOT / "examples"


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


@pytest.mark.parametrize("name", ["my_environment.py", "train_with_nemo.py"])
def test_what_is_to_be_copied_stays_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < 60


def test_train_with_nemo_trains_alone_and_on_two_ranks_alike(warm_start: Path, tmp_path: Path) -> None:
    """The first optimizer step is the same one: equal episodes, loss and gradient norm."""
    example = EXAMPLES / "train_with_nemo.py"
    command = [sys.executable, example, warm_start, tmp_path / "alone", "2"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["alone"]  # nothing is left elsewhere
    run_ranks(2, "script", example, str(warm_start), str(tmp_path / "two"), "2")
    runs = [
        [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("alone", "two")
    ]
    for run in runs:
        assert [record["step"] for record in run] == [1, 2]
        assert all(record["grad_norm"] > 0 for record in run)
    for name in ("loss", "grad_norm", "reward_mean"):
        assert runs[0][0][name] == pytest.approx(runs[1][0][name], rel=1e-5), name
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "alone" / "checkpoint").state_dict()
    before = load_file(warm_start / "model.safetensors")
    assert before.keys() <= trained.keys()
    assert all(not torch.equal(trained[name], tensor) for name, tensor in before.items())


def test_a_model_by_hand_needs_a_vocabulary_size(tmp_path: Path) -> None:
    folder, script = write_model(tmp_path / "model"), tmp_path / "script.py"
    script.write_text(
        "from nemo_flashrl.models import FlashReinforceModel, GRPOModel, nemo_config\n"
        f"config = nemo_config({str(folder)!r}, context_length=64)\n"
        f"print(GRPOModel(config, hf_folder={str(folder)!r}).head)\n"
        "FlashReinforceModel(config)\n"
    )
    printed = run_ranks(1, "script", script, exit_codes=(1,))
    assert "HeadSettings(vocab_size=515, temperature=1.0" in printed
    assert "ValueError: head=None: give HeadSettings(vocab_size=...), or hf_folder" in printed


def test_light_loop_is_right_and_learns_without_nemo(tmp_path: Path) -> None:
    code = """
        import runpy, sys
        for arguments in (["--check"], ["model", "--check"], ["--steps", "20"]):
            sys.argv[1:] = arguments
            runpy.run_path({!r}, run_name="__main__")
        print(sorted({{"nemo", "megatron", "lightning"}} & {{name.split(".")[0] for name in sys.modules}}))
    """
    write_model(tmp_path / "model", "qwen2", tied=True)
    code = textwrap.dedent(code).format(str(EXAMPLES / "light_loop.py"))
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    *lines, strangers = ended.stdout.splitlines()
    assert strangers == "[]"
    differences = [float(line.split()[-1]) for line in lines if line.startswith("fused")]
    assert len(differences) == 8 and max(differences) < 1e-12
    rewards = [float(reward) for reward in re.findall(r"reward (\S+),", ended.stdout)]
    assert len(rewards) == 20 and sum(rewards[-3:]) > sum(rewards[:3]) + 0.3


def test_the_check_of_light_loop_fails_where_a_gradient_is_wrong(monkeypatch) -> None:
    right = ops.fused_linear_policy_loss

    def wrong(*arguments, **options) -> tuple:
        loss, logprobs = right(*arguments, **options)
        return loss.detach() + 1.00001 * (loss - loss.detach()), logprobs  # the value is right

    monkeypatch.setattr(ops, "fused_linear_policy_loss", wrong)
    monkeypatch.setattr(sys, "argv", ["light_loop.py", "--check"])
    with pytest.raises(SystemExit, match="differs from full logits"):
        runpy.run_path(str(EXAMPLES / "light_loop.py"), run_name="__main__")


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
