"""A folder in the layout of a Hugging Face checkpoint: its table of contents, its tensors, and whether they fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nemo_flashrl.weight_sync.hf_config import read_hf_json, refuse_lfs_pointer

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
TIED = "lm_head.weight"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # by safetensors' names


class Entry(NamedTuple):
    """One tensor of a table of contents."""

    shape: tuple[int, ...]
    dtype: str  # safetensors' name
    file: Path


class HfTensors:
    """The tensors of a folder's safetensors files: those of its index, which says where each one is, else of one file.

    Attributes:
        table: `Entry` by name, in the order of the files; those of one file stand together.

    Raises:
        ValueError: the folder holds none, a file is missing or cut short, or the index names what is not there.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        weight_map = self._read_index()
        if not weight_map and not (self.folder / SINGLE).is_file():
            others = any(self.folder.glob("*.safetensors"))
            raise ValueError(f"{self.folder} holds no {f'{SINGLE} and no {INDEX}' if others else '.safetensors file'}")
        self._handles = {file: self._open(file) for file in sorted({self.folder / n for n in weight_map.values()})}
        self._handles = self._handles or {self.folder / SINGLE: self._open(self.folder / SINGLE)}
        self.table: dict[str, Entry] = {}
        for file, handle in self._handles.items():
            for name in handle.keys():  # noqa: SIM118
                if weight_map.get(name, file.name) == file.name:  # else a copy, which nobody keeps up to date
                    part = handle.get_slice(name)
                    self.table[name] = Entry(tuple(part.get_shape()), part.get_dtype(), file)
        for name in sorted(weight_map.keys() - self.table.keys()):
            raise ValueError(f"{self.folder / weight_map[name]} lacks {name!r}, which {INDEX} names: copy it again")

    def names(self) -> Set[str]:
        """All tensors there."""
        return self.table.keys()

    def dtype(self, name: str) -> torch.dtype:
        """Without reading the tensor."""
        return self._handles[self.table[name].file].get_slice(name)[:0].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Without reading the tensor."""
        return self.table[name].shape

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors, by name."""
        return {name: entry.shape for name, entry in self.table.items()}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.table:
            raise ValueError(
                f"{self.folder} holds no tensor {name!r}: the checkpoint is incomplete or of another family"
            )
        return self._handles[self.table[name].file].get_tensor(name)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) in the order of `table`, one at a time."""
        for name in self.table:
            yield name, self[name]

    def conflict(self) -> str:
        """One line on a tensor that another file of the folder has with other values; empty where none has.

        Other readers may take it from there: transformers prefers model.safetensors to an index, vLLM loads every
        tensor of the index's files, whichever comes last.
        """
        single = self.folder / SINGLE
        handles = self._handles | ({single: self._open(single)} if single.is_file() else {})
        for file, handle in handles.items():
            for name in sorted(self.table.keys() & set(handle.keys())):
                entry = self.table[name]
                if entry.file != file and _differ(handle.get_tensor(name), self[name]):
                    return (
                        f"{self.folder}: {name!r} of {file.name} differs from that of {entry.file.name}, which {INDEX} "
                        f"names and which is read; other programs may read {file.name}: remove the copy that is wrong"
                    )
        return ""

    def _read_index(self) -> dict[str, str]:
        path = self.folder / INDEX
        if not path.is_file():
            return {}
        index = read_hf_json(path)
        try:
            return dict(index["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no index of tensors ({error!r}): copy it again") from error

    def _open(self, file: Path) -> Any:
        if not file.is_file():
            raise ValueError(f"{self.folder / INDEX} names {file.name}, which is not there: copy it again")
        refuse_lfs_pointer(file)
        try:
            return safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is not a complete safetensors file ({error}): copy it again") from error


def _differ(a: Tensor, b: Tensor) -> bool:
    return a.dtype != b.dtype or not torch.equal(a, b)


def check_shapes(shapes: Mapping[str, tuple[int, ...]], served: Path, hf_config: Any, where: str) -> None:
    """Raise ValueError unless `shapes` has every tensor of the checkpoint `served` in its shape, and no other."""
    expected = HfTensors(served).shapes()
    if getattr(hf_config, "tie_word_embeddings", False):
        expected.pop(TIED, None)
    missing, strange = expected.keys() - shapes.keys(), shapes.keys() - expected.keys()
    if missing or strange:
        name = min(missing or strange)
        raise ValueError(f"{where}: {name} {'is missing' if missing else 'is no tensor of the model'}")
    for name, shape in shapes.items():
        if shape != expected[name]:
            raise ValueError(f"{where}: {name} has shape {shape}, the model's is {expected[name]}")


def check_finite(tensors: HfTensors, where: str) -> None:
    """Raise ValueError for a tensor with NaN or infinity; reading every value also finds a file that is cut short."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{where}: {name} is not finite")
