"""`key=value` of a command line -> an override in Hydra's grammar; values that no field takes; keys renamed.

A renamed key is refused where a user writes it, and translated in a run's own record.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_flashrl.config.schema import RunConfig

RENAMED = {  # since 0.1.0
    "rollout.uses": "rollout.updates_per_batch",
    "rollout.tied_group_replacements": "rollout.dynamic_sampling_max_groups",
    "optimizer.clip_gradient": "optimizer.max_grad_norm",
    "monitors.selected": "monitors.effective_fraction",
}

PRESETS = ("recipe", "budget", "temperature")  # groups of settings of several sections: no experiment chooses one


def hydra_override(text: str, conf: Path, own: Path, chosen: Collection[str] = ()) -> str:
    """What Hydra is given for `text`; groups are folders of `conf`, with further files in the same folder of `own`.

    A preset needs no `+`; where the file has `chosen` one already, it is replaced.

    A field that the file leaves at its default may be set too (`++`); the typed merge refuses what is no field. Where
    the schema has a plain string, what Hydra's grammar cannot read, or reads as a list or a sweep, is that string.
    `~key` takes out what the file sets: settings of an algorithm that another one does not know.

    >>> hydra_override("output=runs/with space,and comma", conf_folder(), Path())
    "++output='runs/with space,and comma'"

    Raises:
        ValueError: it is not of the form key=value, or its value cannot be read, where it says how to quote it, or is
            none that the field takes.
    """
    if text.startswith("~"):
        return text
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise ValueError(f"override {text!r} is not of the form key=value")
    parsed = _parse(text)
    if (conf / key).is_dir():
        sign = "+" if key in PRESETS and key not in chosen else ""
        return sign + _group_override(text, parsed, (conf / key, own / key))
    if not key[0].isalpha():
        if parsed is None:
            raise ValueError(_unreadable(key, value))
        return text
    if parsed is None or parsed.is_sweep_override() or isinstance(parsed.value(), list | dict):
        is_text = _is_string(key) or value.startswith("~")  # of settings of a plug-in, a path
        if is_text and value[:1] not in ("'", '"'):
            return f"++{key}={quoted(value)}"
        if parsed is None or parsed.is_sweep_override():
            raise ValueError(_unreadable(key, value))
    given = parsed.value()
    for part in reversed(key.split(".")):
        given = {part: given}
    if wrong := misfit(RunConfig, given):
        raise ValueError(wrong)
    return f"++{text}"


def quoted(text: str | Path) -> str:
    """A value that Hydra's grammar reads as this text, whatever is in it but `${`, which is OmegaConf's."""
    return QuotedString(str(text), Quote.single).with_quotes()


def is_named_as_a_folder(override: str, own: Path) -> bool:
    """Whether Hydra would take the field for a group: `output`, where a folder of that name lies beside the file."""
    return override.startswith("++") and (own / override[2:].partition("=")[0]).is_dir()


def set_field(config: DictConfig, override: str) -> None:
    """What Hydra does with `++key=value` where key is no group."""
    parsed = OverridesParser.create().parse_override(override)
    OmegaConf.update(config, parsed.key_or_group, parsed.value(), force_add=True)


def _parse(text: str) -> Override | None:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        return None


def _group_override(text: str, parsed: Override | None, groups: Sequence[Path]) -> str:
    """`model=qwen3_8b`: a file of a group, or null for none."""
    key, _, value = text.partition("=")
    chosen: Any = parsed.value() if parsed is not None and not parsed.is_sweep_override() else 0
    known = sorted({file.stem for group in groups for file in group.glob("*.yaml")})
    if chosen is not None and chosen not in known:
        fields = "" if key in PRESETS else f"; set one of its fields with {key}.FIELD=..."
        raise ValueError(f"{key}={value}: must be one of {', '.join(known)}{fields}")
    return text


def _unreadable(key: str, value: str) -> str:
    kind = _type(key)
    if kind in (int, float, bool, int | None, float | None, bool | None):
        return f"{key}={value}: must be a single {getattr(kind, '__name__', kind)}"
    better = quoted(value.strip("'\""))
    if value.startswith("["):
        better = "[" + ", ".join(f'"{part.strip()}"' for part in value.strip("[]").replace('"', "").split(",")) + "]"
    shown = f"{key}={better}"
    shown = shlex.quote(shown) if set(shown) & set('"$`\\!') else f'"{shown}"'
    return f"{key}={value}: cannot be parsed; quote it for the shell and again inside: {shown}"


def _is_string(key: str) -> bool:
    return _type(key) in (str, str | None)


def _type(key: str) -> Any:
    """What the schema has at `key`; None inside plain mappings, and where there is no such field."""
    owner: Any = RunConfig
    for part in key.split("."):
        owner = get_type_hints(owner).get(part) if dataclasses.is_dataclass(owner) else None
    return owner


def misfit(schema: type, given: Mapping[str, Any], prefix: str = "") -> str | None:
    """Field, value and what would be right of the first value that the dataclass `schema` cannot take.

    >>> misfit(RunConfig, {"trainer": {"steps": "abc"}})
    'trainer.steps=abc: must be a whole number'
    """
    for name, value in given.items():
        kind = get_type_hints(schema).get(name)
        if not dataclasses.is_dataclass(kind):
            if kind is not None and not _fits(schema, name, value):
                return f"{prefix}{name}={_shown(value)}: must be {_what_fits(kind, f'{prefix}{name}', value)}"
        elif not isinstance(value, Mapping):
            fields = ", ".join(item.name for item in dataclasses.fields(kind))
            return (
                f"{prefix}{name}={_shown(value)}: is a section; set one of its fields with {prefix}{name}.FIELD=..., "
                f"of {fields}"
            )
        elif wrong := misfit(kind, value, f"{prefix}{name}."):
            return wrong
    return None


def _fits(schema: type, name: str, value: Any) -> bool:
    try:
        OmegaConf.merge(OmegaConf.structured(schema), {name: value})
    except OmegaConfBaseException:
        return False
    return True


def _what_fits(kind: Any, key: str, value: Any) -> str:
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    null = " or null" if NoneType in kinds else ""
    if get_origin(kinds[0]) is list:
        example = f", as {key}=[{value}]" if isinstance(value, str | int | float) else f", as {key}=[a,b]"
        return f"a list{example}{null}"
    if get_origin(kinds[0]) is dict:
        each = "number" if get_args(kinds[0])[1] is float else "value"
        return f"names with a {each} each, set with {key}.NAME=...{null}"
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(kinds[0], "text") + null


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def refuse_renamed(config: DictConfig, path: Path) -> None:
    """ValueError gives the new name of the first renamed key that `config`, read from `path`, sets."""
    for old, new in RENAMED.items():
        if _sets(config, old):
            raise ValueError(f"{path}: {old} is now {new}")


def with_new_names(config: DictConfig) -> DictConfig:
    """`config`, changed in place: the value of each renamed key stands under its new name."""
    for old, new in RENAMED.items():
        if _sets(config, old):
            section, field = old.split(".")
            OmegaConf.update(config, new, config[section].pop(field))
    return config


def _sets(config: DictConfig, key: str) -> bool:
    section, field = key.split(".")
    return isinstance(config.get(section), DictConfig) and field in config[section]
