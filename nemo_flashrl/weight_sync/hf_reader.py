"""Single tensors out of a Hugging Face checkpoint folder."""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX = "model.safetensors.index.json"


class HfTensors:
    """Reads single tensors out of a folder's safetensors files.

    Raises:
        ValueError: the folder holds none, one of them is torn, or the index names what is not there.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        weight_map = self._read_index()
        files = sorted({self.folder / name for name in weight_map.values()} or self.folder.glob("*.safetensors"))
        if not files:
            raise ValueError(f"model.path={str(folder)!r} holds no .safetensors file")
        self._handles: dict[str, object] = {}
        for file in files:
            if not file.is_file():
                raise ValueError(f"{self.folder / INDEX} names {file.name}, which is not there: copy it again")
            try:
                handle = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{file} is not a complete safetensors file ({error}): copy it again") from error
            self._handles.update(dict.fromkeys(handle.keys(), handle))
        for name in sorted(weight_map.keys() - self._handles.keys()):
            raise ValueError(f"{self.folder / weight_map[name]} lacks {name!r}, which {INDEX} names: copy it again")

    def _read_index(self) -> dict[str, str]:
        path = self.folder / INDEX
        if not path.is_file():
            return {}
        try:
            return dict(json.loads(path.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no index of tensors ({error!r}): copy it again") from error

    def names(self) -> Set[str]:
        """All tensors there."""
        return self._handles.keys()

    def dtype(self, name: str) -> torch.dtype:
        """Without reading the tensor."""
        return self._handles[name].get_slice(name)[:0].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Without reading the tensor."""
        return tuple(self._handles[name].get_slice(name).get_shape())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._handles:
            raise ValueError(
                f"{self.folder} holds no tensor {name!r}: the checkpoint is incomplete or of another family"
            )
        return self._handles[name].get_tensor(name)
