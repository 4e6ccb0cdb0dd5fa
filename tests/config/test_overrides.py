"""`key=value` as people type it: any text where the schema has text, one clear line for what cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest
from paths import TESTS

from nemo_flashrl import algorithms, environments
from nemo_flashrl.commands import path
from nemo_flashrl.config import load, load_saved, quoted, read_plain, settings_of
from nemo_flashrl.config.overrides import RENAMED
from nemo_flashrl.run.record import read_run

GIVEN = ["output=runs/first", "model.path=here"]


@pytest.mark.parametrize(
    "text", ["runs/ünï日本", "runs/with space", "a,b", "a(b)", "it's", "[x", "[x]", r"C:\x'y", "a=b"]
)
def test_text_is_taken_as_it_stands(text: str) -> None:
    assert load("rehearsal", [*GIVEN, f"output={text}"]).output == text
    assert load("rehearsal", [*GIVEN, f"rollout.weights_folder={text}"]).rollout.weights_folder == text


@pytest.mark.parametrize("text", ["runs/it's", "null", "'q'", "12", "a\\", "[x]", "runs/ü, v"])
def test_quoted_text_is_read_as_it_stands(text: str) -> None:
    assert load("rehearsal", ["model.path=here", f"output={quoted(text)}"]).output == text


def test_quotes_are_hydras() -> None:
    assert load("rehearsal", [*GIVEN, "output='a, b'"]).output == "a, b"
    assert load("rehearsal", [*GIVEN, 'rollout.stop=[")"]']).rollout.stop == [")"]
    settings = load("rehearsal", [*GIVEN, "environment.settings.file='ü'"]).environment.settings
    assert settings["file"] == "ü"


REFUSED = {  # override -> how the line begins and ends
    "rollout.stop=[)]": ("rollout.stop=[)]: cannot be parsed; quote", """ 'rollout.stop=[")"]'"""),
    "environment.settings.file=ü": (
        "environment.settings.file=ü: cannot be parsed",
        " \"environment.settings.file='ü'\"",
    ),
    "trainer.steps=1,2": ("trainer.steps=1,2: must be a single int", "int"),
    "rollout.episode_timeout=a(b": ("rollout.episode_timeout=a(b: must be a single float", "float | None"),
    "model=3": ("model=3: must be one of llama3_70b, ", ", tiny; set one of its fields with model.FIELD=..."),
    "algorithm=ppo": ("algorithm=ppo: must be one of flash_reinforce, ", "algorithm.FIELD=..."),
    "recipe=papr": ("recipe=papr: must be one of grpo_baseline, ", ", paper"),  # a preset has no fields
    "trainer.steps=abc": ("trainer.steps=abc: must be a whole number", "number"),
    "parallel.sequence=[1]": ("parallel.sequence=[1]: must be true or false", "false"),
    "rollout.servers=foo": ("rollout.servers=foo: must be a list, as ", " rollout.servers=[foo]"),
    "rollout.max_staleness=late": ("rollout.max_staleness=late: must be a whole number or null", "null"),
    "curriculum.mixture=3": ("curriculum.mixture=3: must be names with a number each", " curriculum.mixture.NAME=..."),
    "parallel=2": (
        "parallel=2: is a section; set one of its fields with parallel.FIELD=..., of tensor, pipeline, ",
        ", overlap_gradients",
    ),
    "optimizer=[1]": ("optimizer=[1]: is a section; set one", ""),
    "+model=ü": ("+model=ü: cannot be parsed", "\"+model='ü'\""),
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_cannot_be_read_is_named_with_what_would_be_right(override: str) -> None:
    with pytest.raises(ValueError) as refusal:
        load("rehearsal", [*GIVEN, override])
    first, last = REFUSED[override]
    assert str(refusal.value).startswith(first)
    assert str(refusal.value).endswith(last)


def test_a_value_of_a_file_or_of_a_plug_in_is_refused_in_the_same_words(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("defaults: [/experiment/rehearsal, _self_]\ntrainer: {steps: soon}\n")
    with pytest.raises(ValueError, match=r"own.yaml: trainer.steps=soon: must be a whole number$"):
        load(str(file), GIVEN)
    with pytest.raises(ValueError, match=r"^algorithm.settings.delta=x: must be a number$"):
        settings_of(algorithms.load("flash_reinforce"), {"delta": "x"}, "algorithm")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing.yaml", ": no such file"),
        ("/nothing/my-model", ": no such file"),
        ("nothing", " is neither a .yaml file nor one of: alfworld_50_turns, "),
    ],
)
def test_a_configuration_that_is_not_there(name: str, said: str) -> None:
    with pytest.raises(ValueError) as refusal:
        load(name, GIVEN)
    assert str(refusal.value).startswith(f"configuration '{name}'{said}")


def test_a_file_in_a_folder_of_any_name(tmp_path: Path) -> None:
    """A folder named as a group, without files, is none."""
    folder = tmp_path / "ünï, (x)"
    (folder / "output").mkdir(parents=True)
    (folder / "algorithm").mkdir()
    (folder / "algorithm" / "mine.yaml").write_text("# @package algorithm\nname: grpo\n")
    (folder / "my run.yaml").write_text(
        "defaults: [/algorithm: flash_reinforce, _self_]\nmodel: {path: here}\nenvironment: {name: openenv}\n"
    )
    assert load(str(folder / "my run.yaml"), ["output=output"]).output == "output"
    assert load(str(folder / "my run.yaml"), ["output=output", "algorithm=mine"]).algorithm.name == "grpo"


def test_what_a_command_does_not_need_may_be_missing(tmp_path: Path) -> None:
    file = tmp_path / "my_run.yaml"
    file.write_text("algorithm: {name: grpo}\nenvironment: {name: key_value_store}\n")
    with pytest.raises(ValueError, match="output is not set: add output="):
        load(str(file), ["model.path=here"])
    config = load(str(file), unneeded=("output", "model.path"))
    assert (config.output, config.model.path) == ("", "")
    file.write_text(file.read_text() + "output: there\nmodel: {path: here}\n")
    config = load(str(file), unneeded=("output", "model.path"))
    assert (config.output, config.model.path) == ("there", "here")


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
@pytest.mark.parametrize("as_override", [False, True], ids=["file", "override"])
def test_a_renamed_key_is_refused_with_its_new_name(tmp_path: Path, old: str, new: str, as_override: bool) -> None:
    section, field = old.split(".")
    file = tmp_path / "run.yaml"
    file.write_text("environment: {name: openenv}\n" + ("" if as_override else f"{section}: {{{field}: 2}}\n"))
    given = [*GIVEN, f"{old}=2"] if as_override else GIVEN
    with pytest.raises(ValueError) as refusal:
        load(str(file), given)
    assert str(refusal.value) == f"{file}: {old} is now {new}"


def test_the_record_of_a_run_is_read_with_renamed_keys() -> None:
    """Version 0.1.0 wrote `clip_gradient: 1.0` there: the run can be resumed, and reports find the value."""
    file = TESTS / "fixtures" / "run" / "config.yaml"
    assert "clip_gradient: 1.0" in file.read_text()
    assert load_saved(file).optimizer.max_grad_norm == 1.0
    assert read_plain(file)["optimizer"]["max_grad_norm"] == 1.0
    assert "clip_gradient" not in read_plain(file)["optimizer"]


def test_a_tilde_is_a_home_folder_wherever_a_path_is_read(tmp_path: Path, monkeypatch) -> None:
    """In a file and in `key=~/...` no shell expands it."""
    monkeypatch.setenv("HOME", "/home/me")
    file = tmp_path / "mine.yaml"
    file.write_text("output: ~/runs/x\nmodel: {path: ~/m}\nenvironment: {name: python_tool}\n")
    more = ["rollout.weights_folder=~/w", "environment.settings.questions.path=~/data.jsonl"]
    config = load(str(file), more)
    assert (config.output, config.model.path) == ("/home/me/runs/x", "/home/me/m")
    assert config.rollout.weights_folder == "/home/me/w"
    assert load(str(file), ["output=~/a b, c"]).output == "/home/me/a b, c"
    settings = settings_of(environments.load("python_tool"), config.environment.settings, "environment")
    assert settings.questions.path == "/home/me/data.jsonl"
    settings = settings_of(environments.load("verifiable_math"), {"path": "~/q.jsonl"}, "environment")
    assert settings.path == "/home/me/q.jsonl"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load("~/mine.yaml").output == f"{tmp_path}/runs/x"
    with pytest.raises(ValueError, match=f"'{tmp_path}/none' holds no metrics.jsonl"):
        read_run(path("~/none"))
