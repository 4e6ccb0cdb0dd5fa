"""A folder in the layout of a Hugging Face checkpoint: its table of contents, its tensors, and whether they fit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"
TIED = "lm_head.weight"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # by safetensors' names


class Entry(NamedTuple):
    """One tensor of a table of contents."""

    shape: tuple[int, ...]
    dtype: str  # safetensors' name
    file: Path


def read_table(folder: Path) -> dict[str, Entry]:
    """The tensors of a checkpoint folder by name, in the order of its files.

    Raises:
        ValueError: a file is missing or cut short.
    """
    index = folder / INDEX
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    found = {}
    for file in sorted(folder / name for name in files):
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118
                    part = handle.get_slice(name)
                    found[name] = Entry(tuple(part.get_shape()), part.get_dtype(), file)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file} is not a complete safetensors file ({error})") from error
    return found


def read_tensors(table: Mapping[str, Entry]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) in the order of `table`, one at a time; entries of one file stand together."""
    files: dict[Path, list[str]] = {}
    for name, entry in table.items():
        files.setdefault(entry.file, []).append(name)
    for file, names in files.items():
        with safe_open(file, framework="pt") as handle:
            for name in names:
                yield name, handle.get_tensor(name)


def check_shapes(shapes: Mapping[str, tuple[int, ...]], served: Path, hf_config: Any, where: str) -> None:
    """Raise ValueError unless `shapes` has every tensor of the checkpoint `served` in its shape, and no other."""
    expected = {name: entry.shape for name, entry in read_table(served).items()}
    if getattr(hf_config, "tie_word_embeddings", False):
        expected.pop(TIED, None)
    missing, strange = expected.keys() - shapes.keys(), shapes.keys() - expected.keys()
    if missing or strange:
        name = min(missing or strange)
        raise ValueError(f"{where}: {name} {'is missing' if missing else 'is no tensor of the model'}")
    for name, shape in shapes.items():
        if shape != expected[name]:
            raise ValueError(f"{where}: {name} has shape {shape}, the model's is {expected[name]}")


def check_finite(table: Mapping[str, Entry], where: str) -> None:
    """Raise ValueError for a tensor with NaN or infinity; reading every value also finds a file that is cut short."""
    for name, tensor in read_tensors(table):
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{where}: {name} is not finite")
