"""What a Hugging Face checkpoint folder says of itself in its JSON files; read where torch is not imported yet."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    *("num_local_experts", "num_experts", "num_experts_per_tok"),
)


def check_folder(folder: str | Path) -> None:
    """ValueError where `model.path` is no folder; a name on the Hugging Face hub gets the command that downloads it."""
    if Path(folder).is_dir():
        return
    where, name = f"model.path={str(folder)!r}: no such folder", str(folder)
    if Path(folder).exists() or not _HUB_NAME.fullmatch(name):
        raise ValueError(f"{where}; give a Hugging Face checkpoint folder")
    local = Path("models") / Path(folder).name
    raise ValueError(
        f"{where}; it looks like a name on the Hugging Face hub, and nothing is downloaded by itself: run "
        f"`hf download {name} --local-dir {local}` and set model.path={local}"
    )


def read_config(folder: str | Path) -> dict[str, Any]:
    """The config.json of `model.path`; `rope_theta` and `rope_scaling` also where transformers 5 wrote neither.

    Raises:
        ValueError: one line: the folder is not there, or holds no such file, or one that is not JSON.
    """
    check_folder(folder)
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"model.path={str(folder)!r} holds no config.json: give a Hugging Face checkpoint folder")
    refuse_lfs_pointer(path)
    return with_rope_fields(read_hf_json(path))


def read_hf_json(path: Path) -> dict[str, Any]:
    """A JSON object of a Hugging Face folder, its sizes whole numbers.

    Raises:
        ValueError: one line with the file and the line in it.
    """
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text)
    except (ValueError, RecursionError) as error:  # json's own word has the line
        raise ValueError(f"{path} is not JSON ({error}): copy it again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a JSON object: copy it again")
    for name in SIZES:
        if not is_size(found.get(name)):
            line = 1 + text[: text.index(f'"{name}"')].count("\n")
            raise ValueError(f"{path}:{line}: {name}={found[name]!r} must be a whole number")
    return found


def is_size(value: Any) -> bool:
    """Whether a value of config.json can count something; None says nothing."""
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)


def with_rope_fields(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json with the fields that both transformers 4 and 5 read; as it was where it has them."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict):
        return config
    own = ("rope_theta", "partial_rotary_factor")  # fields beside rope_scaling in transformers 4
    scaling = {name: value for name, value in rope.items() if name not in own}
    if scaling.get("rope_type", "default") == "default":
        scaling = None
    return {**config, **{name: rope[name] for name in own if name in rope}, "rope_scaling": scaling}


def with_tokenizer_fields(config: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer_config.json that both transformers 4 and 5 read; as it was where they do."""
    extra = config.get("extra_special_tokens")
    if isinstance(extra, list):  # transformers 4 has a mapping there, and the list under another name
        config = {name: value for name, value in config.items() if name != "extra_special_tokens"}
        config["additional_special_tokens"] = extra
    if config.get("tokenizer_class") == "TokenizersBackend":
        config = {**config, "tokenizer_class": "PreTrainedTokenizerFast"}
    return config


def context_limit(config: Mapping[str, Any]) -> int | None:
    """Positions that a model is made for; with YaRN its factor times the original ones, as model cards have it."""
    limit, scaling = config.get("max_position_embeddings"), config.get("rope_scaling") or {}
    original = scaling.get("original_max_position_embeddings") or limit
    if limit is None or scaling.get("rope_type", scaling.get("type")) != "yarn":
        return limit
    return max(limit, int(scaling["factor"] * original))


def refuse_lfs_pointer(path: Path) -> None:
    """ValueError where a file is what Git keeps in the place of a large one."""
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ValueError(
                f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in the folder it was cloned to, "
                "or download it again with `hf download`"
            )
