"""What a server cannot serve, told in a line before vLLM says it in hundreds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from nemo_flashrl.weight_sync.hf_config import check_folder, refuse_lfs_pointer

SMALLEST_CPU_HEAD = 32  # of vLLM's attention on a CPU; a smaller one kills the engine at its first request


def are_tokens(folder: Path, strings: Sequence[str]) -> bool:
    """Whether each of `strings` is one token of the folder's tokenizer.json; without one there is no text to search."""
    path = folder / "tokenizer.json"
    if not strings or not path.is_file():
        return True
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]  # spelling -> id, or in a Unigram model [spelling, score]
    known = set(vocab) if isinstance(vocab, dict) else {piece for piece, _ in vocab}
    return {*strings} <= known | {token["content"] for token in tokenizer["added_tokens"]}


def check_model(folder: Path, accelerated: bool) -> None:
    """Refuse a folder that holds no model, and one that vLLM's CPU build cannot compute.

    Raises:
        ValueError: it is such a folder.
    """
    check_folder(folder)
    if (folder / "config.json").is_file():
        refuse_lfs_pointer(folder / "config.json")
    try:
        config = json.loads((folder / "config.json").read_text())
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"model.path={str(folder)!r}: config.json names no model ({error!r})") from error
    if not accelerated and head < SMALLEST_CPU_HEAD:
        raise ValueError(
            f"model.path={str(folder)!r}: heads of {head}; vLLM on a CPU needs {SMALLEST_CPU_HEAD} or more. "
            "rollout.engine=transformers samples from such a model"
        )
