"""Single tensors out of a Hugging Face checkpoint folder."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor


class HfTensors:
    """Reads single tensors out of a folder's safetensors files."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise ValueError(f"model.path={str(folder)!r} holds no .safetensors file")
        self._handles: dict[str, object] = {}
        for file in files:
            try:
                handle = safe_open(file, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{file} is not a whole safetensors file ({error}): copy it again") from error
            self._handles.update(dict.fromkeys(handle.keys(), handle))

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._handles:
            raise ValueError(
                f"{self.folder} holds no tensor {name!r}: the checkpoint is incomplete or of another family"
            )
        return self._handles[name].get_tensor(name)
