"""The presets of `conf/budget` compose with every shipped experiment, and say what their names promise."""

from __future__ import annotations

import pytest
from paths import ROOT

from nemo_flashrl.algorithms.grpo import Grpo, GrpoSettings
from nemo_flashrl.config import load, settings_of
from nemo_flashrl.preflight.conflicts import changed_settings, conflict_table

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
