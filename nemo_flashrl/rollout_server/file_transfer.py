"""A vLLM weight-transfer backend: new weights arrive as a folder of safetensors files that every worker reads itself.

Built-in backends need a GPU on both sides. The folder lies in shared memory on one node, on a shared file system
otherwise. Everything is checked against the checkpoint that the server started from before the first weight is
touched, so a refused update leaves the old weights serving.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

INDEX = "model.safetensors.index.json"
TIED = "lm_head.weight"


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """Where the new weights lie: a folder in the layout of a Hugging Face checkpoint."""

    folder: str


class FileTransfer(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """Reads, checks and loads a folder in one step; starting and finishing an update do nothing to the model.

    vLLM's layerwise reload puts the model on the meta device while it runs. Between two HTTP calls that would be
    a server without weights, and fatal where the second call never comes.
    """

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """See `start_weight_update`."""

    def start_weight_update(self) -> None:
        """Nothing to prepare."""

    def finish_weight_update(self) -> None:
        """Nothing is left to do."""

    def shutdown(self) -> None:
        """Nothing is held."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, which synchronises an accelerator that a CPU lacks."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Check the folder, then load it.

        Raises:
            ValueError: a file, tensor or shape is not what the served checkpoint has; the model is untouched.
        """
        files = check_folder(Path(update_info.folder), Path(self.model_config.model), self.model_config.hf_config)
        initialize_layerwise_reload(self.model)
        self.model.load_weights(_tensors(files))
        finalize_layerwise_reload(self.model, self.model_config)


def check_folder(folder: Path, served: Path, hf_config: Any) -> dict[str, Path]:
    """File by tensor name of `folder`, after names, shapes, types and finiteness have been compared with `served`.

    Reading every value once also means that a file which is cut short is found here.
    """
    expected = {name: shape for name, (_, shape) in _headers(served).items()}
    found = _headers(folder)
    if getattr(hf_config, "tie_word_embeddings", False):
        expected.pop(TIED, None)
    missing, strange = expected.keys() - found.keys(), found.keys() - expected.keys()
    if missing or strange:
        name = min(missing or strange)
        raise ValueError(f"weights in {folder}: {name} {'is missing' if missing else 'is no tensor of the model'}")
    for name, (_, shape) in found.items():
        if shape != expected[name]:
            raise ValueError(f"weights in {folder}: {name} has shape {shape}, the model's is {expected[name]}")
    files = {name: file for name, (file, _) in found.items()}
    for name, tensor in _tensors(files):
        if not torch.isfinite(tensor).all():
            raise ValueError(f"weights in {folder}: {name} is not finite")
    return files


def _headers(folder: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """(file, shape) by tensor name of a checkpoint folder."""
    index = folder / INDEX
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    found = {}
    for file in sorted(folder / name for name in files):
        try:
            with safe_open(file, framework="pt") as handle:
                found |= {name: (file, tuple(handle.get_slice(name).get_shape())) for name in handle.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file} is no whole safetensors file ({error})") from error
    return found


def _tensors(files: dict[str, Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) in the files' order, one at a time."""
    for file in dict.fromkeys(files.values()):
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118
                yield name, handle.get_tensor(name)
