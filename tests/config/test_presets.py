"""The presets of `conf/budget` and `conf/recipe` compose with shipped experiments and say what they promise.

Each recipe is trained for two steps of the rehearsal's task too.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from paths import ROOT
from processes import run_ranks

from nemo_flashrl.algorithms.flash_reinforce import FlashReinforce, FlashReinforceSettings
from nemo_flashrl.algorithms.grpo import Grpo, GrpoSettings
from nemo_flashrl.cli import main
from nemo_flashrl.config import RunConfig, load, settings_of
from nemo_flashrl.preflight.conflicts import changed_settings, conflict_table, report_conflicts
from nemo_flashrl.run.jsonl import read_json_lines

CONF = ROOT / "conf"
PROMISES = {  # key -> value
    "100h": {"kl.coefficient": 0.01, "kl.schedule": "fixed", "rollout.temperature": 1.0, "advantage.clip": None},
    "1000h": {"kl.coefficient": 0.005, "rollout.temperature": 0.9, "selection.tokens": "actions"},
    "10000h": {"kl.schedule": "annealed", "reference.mode": "ema", "curriculum.mode": "adaptive"},
}


def test_every_preset_is_here() -> None:
    assert {path.stem for path in (CONF / "budget").glob("*.yaml")} == PROMISES.keys()


@pytest.mark.parametrize("budget", PROMISES)
@pytest.mark.parametrize("experiment", ["rehearsal", "alfworld_50_turns"])
def test_a_preset_composes_and_has_no_conflict(budget: str, experiment: str) -> None:
    """The second experiment has settings of FlashREINFORCE that GRPO does not know."""
    config = load(experiment, ["output=x", "model.path=x", f"+budget={budget}", "trainer.steps=7"])
    for key, value in PROMISES[budget].items():
        section, field = key.split(".")
        assert getattr(getattr(config, section), field) == value, key
    assert config.algorithm.name == "grpo" and config.trainer.steps == 7
    settings = settings_of(Grpo, config.algorithm.settings, "algorithm")
    assert settings == GrpoSettings(group_size=8, normalisation="z_score")
    assert config.rollout.batch_size % settings.group_size == 0
    assert conflict_table(changed_settings(config, Grpo(settings))) == ""
    assert config.environment.name == load(experiment, ["output=x", "model.path=x"]).environment.name


GIVEN = ["output=x", "model.path=x"]
RECIPES = {  # name -> (the algorithm's settings, key -> value)
    "paper": (
        FlashReinforceSettings(delta=3e-3),
        {"rollout.mode": "in_flight", "rollout.max_staleness": 4, "reference.mode": "none", "kl.coefficient": 0.0},
    ),
    "long_agent": (
        FlashReinforceSettings(delta=3e-3, baseline="both", normalise=True),
        {
            "rollout.mode": "in_flight",
            "rollout.max_staleness": 4,
            "reference.mode": "ema",
            "reference.beta": 0.99,
            "kl.coefficient": 0.01,
            "kl.place": "loss",
            "batching.layout": "packed",
            "batching.context_margin": 0.1,
        },
    ),
    "grpo_baseline": (
        GrpoSettings(group_size=8, normalisation="z_score"),
        {"rollout.mode": "sync", "rollout.max_staleness": None, "reference.mode": "frozen", "kl.coefficient": 0.01},
    ),
    "orthogonal": (
        GrpoSettings(group_size=8, normalisation="quantile"),
        {
            "advantage.clip": 3.0,
            "reference.mode": "ema",
            "selection.tokens": "actions",
            "trainer.strict": True,
            "length_penalty.coefficient": 0.1,
            "length_penalty.limit": 1024.0,
            "length_penalty.decay_steps": 7,
        },
    ),
}


def value_of(config: RunConfig, key: str) -> object:
    section, field = key.split(".")
    return getattr(getattr(config, section), field)


def test_every_recipe_is_here() -> None:
    assert {path.stem for path in (CONF / "recipe").glob("*.yaml")} == RECIPES.keys()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("experiment", ["rehearsal", "alfworld_50_turns", "llama3_70b"])
def test_a_recipe_is_one_setting(recipe: str, experiment: str) -> None:
    config = load(experiment, [*GIVEN, f"recipe={recipe}", "trainer.steps=7"])
    assert config == load(experiment, [*GIVEN, f"+recipe={recipe}", "trainer.steps=7"])
    own, promised = RECIPES[recipe]
    plugin = Grpo if isinstance(own, GrpoSettings) else FlashReinforce
    assert settings_of(plugin, config.algorithm.settings, "algorithm") == own
    assert {key: value_of(config, key) for key in promised} == promised
    plain = load(experiment, GIVEN)
    assert (config.model, config.environment, config.optimizer) == (plain.model, plain.environment, plain.optimizer)
    config.trainer.strict = True
    report_conflicts(config, plugin(own), shown=False)  # none


def test_a_recipe_goes_over_the_file_and_the_command_line_over_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "defaults:\n  - /algorithm: flash_reinforce\n  - /environment: key_value_store\n  - _self_\n"
        "rollout:\n  temperature: 0.8\n  mode: sync\n  lag: 2\ncurriculum:\n  mode: adaptive\ngroup_size:\n  every: 5\n"
        "value_head:\n  learning_rate: 0.01\nadvantage:\n  clip: 1\nkl:\n  coefficient: 0.2\nreference:\n  mode: hard\n"
    )
    for recipe in RECIPES:
        bare = load(str(file), [*GIVEN, f"recipe={recipe}"])
        neutral = load("rehearsal", [*GIVEN, f"recipe={recipe}"])
        for section in ("curriculum", "group_size", "value_head", "advantage", "kl", "reference"):
            assert getattr(bare, section) == getattr(neutral, section), (recipe, section)
        assert (bare.rollout.temperature, bare.rollout.lag) == (1.0, 0)
    assert load("rehearsal", [*GIVEN, "recipe=paper", "kl.coefficient=0.03"]).kl.coefficient == 0.03
    with pytest.raises(ValueError, match="recipe=papr: must be one of grpo_baseline, long_agent, orthogonal, paper"):
        load("rehearsal", [*GIVEN, "recipe=papr"])


def test_a_files_own_recipe_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "defaults:\n  - /algorithm: flash_reinforce\n  - /environment: key_value_store\n  - /recipe: paper\n"
        "  - _self_\n"
    )
    assert load(str(file), GIVEN).rollout.mode == "in_flight"
    assert load(str(file), [*GIVEN, "recipe=grpo_baseline"]).algorithm.name == "grpo"


def test_a_recipe_and_a_budget_are_refused(tmp_path: Path) -> None:
    """Together they gave GRPO the settings of FlashREINFORCE."""
    file = tmp_path / "mine.yaml"
    file.write_text(
        "defaults:\n  - /algorithm: flash_reinforce\n  - /environment: key_value_store\n  - /budget: 1000h\n"
        "  - _self_\n"
    )
    said = "recipe=paper budget={}: each chooses an algorithm and its techniques; give one of the two"
    for name, given, budget in (
        ("rehearsal", ["recipe=paper", "budget=100h"], "100h"),
        ("rehearsal", ["+budget=100h", "+recipe=paper"], "100h"),
        (str(file), ["recipe=paper"], "1000h"),
    ):
        with pytest.raises(ValueError, match=re.escape(said.format(budget))):
            load(name, [*GIVEN, *given])
    assert load(str(file), [*GIVEN, "recipe=paper", "~budget"]).algorithm.name == "flash_reinforce"
    assert load(str(file), GIVEN).rollout.temperature == 0.9
    assert load("rehearsal", [*GIVEN, "recipe=paper", "temperature=quarter"]).rollout.temperature_schedule


def test_help_shows_recipes_and_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    for name in (*RECIPES, *PROMISES):
        assert f"\n  {name} " in text, name


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains(recipe: str, warm_start: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    short = ["trainer.steps=2", "rollout.batch_size=16", "checkpoint.every_steps=0"]
    limit = ["length_penalty.limit=4"] if recipe == "orthogonal" else []  # a turn has five tokens here
    run_ranks(
        1, "training", "rehearsal", f"output={run}", f"model.path={warm_start}", f"recipe={recipe}", *short, *limit
    )
    first, last = read_json_lines(run / "metrics.jsonl")
    assert ("kl" in last) == (recipe != "paper")
    assert ("gate_acceptance" in last) == (recipe in ("paper", "long_agent"))
    assert first.get("group_size") == (8.0 if "gate_acceptance" not in first else None)
    assert last.get("beta") == (None if recipe == "paper" else 0.01)
    assert (first.get("length_penalty", 0) > last.get("length_penalty", 0) > 0) == (recipe == "orthogonal")
    if recipe == "long_agent":  # over the root mean square of their own batch, in the first of which no window is known
        assert first["advantage_std"] == pytest.approx(1, abs=1e-4) or first["reward_std"] == 0
