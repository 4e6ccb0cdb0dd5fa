"""YAML -> a checked configuration; the only reader of it.

A configuration file is composed by Hydra: a `defaults` list may name files under `conf/`, and `key=value` overrides
come last.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from nemo_flashrl.config.overrides import (
    PRESETS,
    hydra_override,
    is_named_as_a_folder,
    misfit,
    quoted,
    refuse_renamed,
    set_field,
    with_new_names,
)
from nemo_flashrl.config.schema import RolloutConfig, RunConfig

# Fields in which ~ is a home folder, as a shell has it.
PATHS = ("output", "model.path", "rollout.weights_folder", "length_penalty.novelty")


def conf_folder() -> Path:
    """The shipped configuration files: `conf/` of a checkout, package data of an installed wheel."""
    return Path(__file__).parents[1] / "conf"


def load(name_or_path: str, overrides: Sequence[str] | None = None, *, unneeded: Sequence[str] = ()) -> RunConfig:
    """Read and check a configuration; from then on, what it names can be imported from its folder too.

    Args:
        name_or_path: a YAML file, or the name of one under `conf/experiment`.
        overrides: `key=value` in Hydra's grammar.
        unneeded: text fields that are empty where neither the file nor an override sets them, instead of a refusal.

    Raises:
        ValueError: one line with field, value and remedy.
    """
    path = Path(os.path.expanduser(name_or_path))
    if path.suffix not in {".yaml", ".yml"}:
        path = conf_folder() / "experiment" / f"{name_or_path}.yaml"
    if not path.is_file():
        if path.parent != conf_folder() / "experiment":
            raise ValueError(f"configuration {name_or_path!r}: no such file")
        shipped = ", ".join(sorted(p.stem for p in (conf_folder() / "experiment").glob("*.yaml")))
        raise ValueError(f"configuration {name_or_path!r} is neither a .yaml file nor one of: {shipped}")
    try:
        with initialize_config_dir(str(path.parent.resolve()), version_base="1.3"):
            search = f"hydra.searchpath=[{quoted(f'file://{conf_folder().resolve()}')}]"
            chosen = _chosen_presets(path)
            _refuse_two_algorithms(chosen, overrides or [])
            given = [hydra_override(text, conf_folder(), path.parent, chosen) for text in overrides or []]
            fields = [text for text in given if is_named_as_a_folder(text, path.parent)]
            raw = compose(path.stem, overrides=[search, *(text for text in given if text not in fields)])
        for text in fields:
            set_field(raw, text)
        refuse_renamed(raw, path)
        merged = _typed(raw, path)
        for key in unneeded:
            if OmegaConf.select(merged, key) is None:  # missing
                OmegaConf.update(merged, key, "")
        _expand_paths(merged)
        config = OmegaConf.to_object(merged)
    except (HydraException, OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise ValueError(_one_line(error, path)) from error
    check(config)
    if (folder := str(path.parent.resolve())) not in sys.path and conf_folder() not in path.parents:
        sys.path.append(folder)  # last: it hides nothing that is installed
    return config


def _typed(raw: DictConfig, path: Path) -> DictConfig:
    """`raw`, read from `path`, over the schema's defaults."""
    try:
        return OmegaConf.merge(OmegaConf.structured(RunConfig), raw)
    except OmegaConfBaseException as error:
        if wrong := misfit(RunConfig, OmegaConf.to_container(raw)):
            raise ValueError(f"{path}: {wrong}") from error
        raise


def _expand_paths(config: DictConfig) -> None:
    for name in PATHS:
        if value := OmegaConf.select(config, name):
            OmegaConf.update(config, name, os.path.expanduser(value))


def _chosen_presets(path: Path) -> dict[str, str]:
    """Groups of `PRESETS` that the file's own `defaults` name -> what of each."""
    text = path.read_text(encoding="utf-8", errors="replace")
    named = rf"^\s*-\s+(?:override\s+)?/?({'|'.join(PRESETS)})\s*:\s*(\S*)"
    return dict(re.findall(named, text, re.MULTILINE))


def _refuse_two_algorithms(presets: Mapping[str, str], overrides: Sequence[str]) -> None:
    """A recipe and a budget choose an algorithm each: the settings of one would be given to the other's."""
    chosen = dict(presets)
    for text in overrides:
        key, _, value = text.lstrip("+~").partition("=")
        chosen[key] = "" if text.startswith("~") else value
    both = [f"{group}={chosen[group]}" for group in ("recipe", "budget") if chosen.get(group)]
    if len(both) == 2:
        raise ValueError(f"{' '.join(both)}: each chooses an algorithm and its techniques; give one of the two")


def save(config: RunConfig, path: Path) -> None:
    """Write what a run was started with, defaults included; `load` reads it back."""
    OmegaConf.save(OmegaConf.structured(config), path)


def load_saved(path: Path) -> RunConfig:
    """What `save` wrote, renamed keys under their new names, new fields at their defaults.

    Raises:
        ValueError: one line with field, value and remedy.
    """
    try:
        saved = with_new_names(OmegaConf.load(path))
        return OmegaConf.to_object(_typed(saved, path))
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise ValueError(_one_line(error, path)) from error


def read_plain(path: Path) -> dict[str, Any]:
    """What `save` wrote, unchecked, renamed keys under their new names.

    Raises:
        ValueError: the file is not YAML.
    """
    try:
        return OmegaConf.to_container(with_new_names(OmegaConf.load(path)))
    except (YAMLError, UnicodeDecodeError) as error:
        raise ValueError(_one_line(error, path)) from error


def _one_line(error: Exception, path: Path) -> str:
    if isinstance(error, MarkedYAMLError):  # the file may be one that `defaults` names
        mark = error.problem_mark or error.context_mark
        hint = ": indent with spaces" if "'\\t'" in str(error.problem) else ""
        opened = f", in what begins at line {error.context_mark.line + 1}" if error.context_mark else ""
        return f"{mark.name}:{mark.line + 1}: {error.problem}{opened}{hint}"
    if isinstance(error, UnicodeDecodeError):
        line = error.object.count(b"\n", 0, error.start) + 1
        return f"{path}:{line}: not UTF-8 text ({error.reason})"
    if isinstance(error, YAMLError):
        return f"{path}: {' '.join(str(error).split())}"
    cause = error.__cause__ or error
    key = getattr(cause, "full_key", None) or getattr(error, "full_key", None)
    if type(cause).__name__ in {"ConfigKeyError", "ConfigAttributeError"} and key:
        return f"{path}: unknown key {key!r}; known here: {', '.join(_known_keys(key))}"
    if isinstance(cause, MissingMandatoryValue):
        return f"{path}: {key} is not set: add {key}=..."
    message = str(cause).strip().splitlines()[0]
    return f"{path}: {f'{key}: ' if key else ''}{message}"


def _known_keys(key: str) -> list[str]:
    """The fields beside a misspelt one."""
    owner: Any = RunConfig()
    for part in key.split(".")[:-1]:
        owner = getattr(owner, part, owner)
    return [f.name for f in dataclasses.fields(owner)]


def check(config: RunConfig) -> None:
    """Refuse what no machine could run; ValueError names field, value and remedy."""
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        for item in dataclasses.fields(values) if dataclasses.is_dataclass(values) else ():
            name, value = f"{section.name}.{item.name}", getattr(values, item.name)
            _check_value(name, value, item.metadata)
            if item.type == "dict[str, float]":
                for key, number in value.items():
                    _check_value(f"{name}.{key}", number, {"range": (-math.inf, math.inf)})
    _check_mode(config.rollout)
    _check_group_size(config)
    _check_credit(config)
    if config.curriculum.mixture and min(config.curriculum.mixture.values()) <= 0:
        raise ValueError(f"curriculum.mixture={config.curriculum.mixture}: every class needs a weight above 0")
    if config.curriculum.mixture and not config.curriculum.classes:
        raise ValueError(
            f"curriculum.mixture={config.curriculum.mixture} needs curriculum.classes, the field of a task"
        )


def _check_mode(rollout: RolloutConfig) -> None:
    if rollout.mode == "sync" and rollout.max_in_flight > rollout.batch_size:
        raise ValueError(
            f"rollout.max_in_flight={rollout.max_in_flight}: at most rollout.batch_size ({rollout.batch_size}) with "
            "rollout.mode=sync; set rollout.mode to async or in_flight"
        )
    if rollout.mode != "sync" and rollout.lag:
        raise ValueError(f"rollout.lag={rollout.lag}: a fixed lag is for rollout.mode=sync, not {rollout.mode}; set 0")
    if rollout.max_staleness is not None and rollout.max_staleness < rollout.lag:
        raise ValueError(
            f"rollout.max_staleness={rollout.max_staleness}: every batch is rollout.lag={rollout.lag} versions old"
        )


def _check_group_size(config: RunConfig) -> None:
    rollout, every = config.rollout, config.group_size.every
    if every and (rollout.mode != "sync" or rollout.lag):
        raise ValueError(
            f"group_size.every={every}: a group's size changes only with no episode in flight; set "
            f"rollout.mode=sync and rollout.lag=0 (they are {rollout.mode} and {rollout.lag})"
        )
    most = config.group_size.max
    if every and most:
        raise ValueError(f"group_size.max={most}: group_size.every={every} sets one size for all prompts; set one to 0")
    if 0 < most < config.group_size.min:
        raise ValueError(f"group_size.max={most}: must be at least group_size.min ({config.group_size.min}), or 0")


def _check_credit(config: RunConfig) -> None:
    advantage, length = config.advantage, config.length_penalty
    if length.coefficient > 0 and length.limit == 0:
        raise ValueError(f"length_penalty.coefficient={length.coefficient:g} needs length_penalty.limit above 0")
    if advantage.turn_discount != 1 and advantage.turn_coefficient == 0:
        raise ValueError(
            f"advantage.turn_discount={advantage.turn_discount:g} applies to per-turn returns: set "
            "advantage.turn_coefficient above 0"
        )
    in_reward = config.kl.coefficient > 0 and config.kl.place == "reward"
    if advantage.turn_coefficient > 0 and (in_reward or config.value_head.learning_rate > 0):
        raise ValueError(
            f"advantage.turn_coefficient={advantage.turn_coefficient:g}: a KL in the reward and a value head are "
            "per trajectory, not per turn; set kl.place=loss and value_head.learning_rate=0"
        )
    if config.value_head.learning_rate > 0 and config.parallel.context > 1:
        raise ValueError(
            f"value_head.learning_rate={config.value_head.learning_rate:g}: its hidden states are not gathered over "
            f"context-parallel ranks; set parallel.context=1, not {config.parallel.context}"
        )


def _check_value(name: str, value: Any, allowed: Mapping[str, tuple]) -> None:
    if "range" in allowed and value is not None:
        lowest, highest = allowed["range"]
        if not math.isfinite(value):
            raise ValueError(f"{name}={value!r}: must be a finite number")
        if not lowest <= value <= highest:
            raise ValueError(f"{name}={value!r}: must be at least {lowest:g}, at most {highest:g}")
    if value not in allowed.get("choices", (value,)):
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(filter(None, allowed['choices']))}")


def settings_of(plugin: type, given: dict[str, Any], where: str) -> Any:
    """`plugin.Settings` filled from a mapping; an unknown key or a bad value is a ValueError that names it.

    In a field declared with `metadata={"path": True}`, ~ is a home folder.
    """
    known = [f.name for f in dataclasses.fields(plugin.Settings)]
    for key in given:
        if key not in known:
            raise ValueError(f"unknown key '{where}.settings.{key}'; known here: {', '.join(known)}")
    try:
        given = _with_paths(plugin.Settings, given)
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(plugin.Settings), given))
    except OmegaConfBaseException as error:
        wrong = misfit(plugin.Settings, given, f"{where}.settings.")
        raise ValueError(wrong or f"{where}.settings.{error.full_key}: {str(error).splitlines()[0]}") from error


def _with_paths(settings: type, given: dict[str, Any]) -> dict[str, Any]:
    types, known = get_type_hints(settings), {item.name: item for item in dataclasses.fields(settings)}
    out = dict(given)
    for name, value in given.items():
        if isinstance(value, str) and name in known and known[name].metadata.get("path"):
            out[name] = os.path.expanduser(value)
        elif isinstance(value, dict) and dataclasses.is_dataclass(types.get(name)):
            out[name] = _with_paths(types[name], value)
    return out
