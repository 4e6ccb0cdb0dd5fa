"""Every environment that ships has a configuration that loads, and tasks."""

from __future__ import annotations

import pytest

from nemo_flashrl import environments, plugins
from nemo_flashrl.config import load, settings_of
from nemo_flashrl.config.loading import conf_folder

SHIPPED = sorted(plugins.available("nemo_flashrl.environments"))
# The rehearsal is the experiment of the key-value store.
EXPERIMENTS = {name: name for name in SHIPPED} | {"key_value_store": "rehearsal"}


def test_what_ships() -> None:
    names = ["key_value_store", "openenv", "python_tool", "reasoning_gym", "textworld", "verifiable_math"]
    assert names == SHIPPED
    assert sorted(path.stem for path in (conf_folder() / "environment").glob("*.yaml")) == names


@pytest.mark.parametrize("name", SHIPPED)
def test_its_configuration(name: str) -> None:
    config = load(EXPERIMENTS[name], ["output=unused", "model.path=unused"])
    assert config.environment.name == name
    environment = environments.load(name)
    settings = settings_of(environment, config.environment.settings, "environment")
    tasks = environment.tasks(settings)
    assert len(tasks) >= 100
    assert isinstance(environment(settings), environments.Environment)


def test_settings_inside_settings() -> None:
    tool = environments.load("python_tool")
    assert settings_of(tool, {"questions": {"terms": 5}}, "environment").questions.terms == 5
    with pytest.raises(ValueError, match=r"environment.settings.questions.term"):
        settings_of(tool, {"questions": {"term": 5}}, "environment")
