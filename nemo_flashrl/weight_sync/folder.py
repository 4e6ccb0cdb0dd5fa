"""A stream of tensors -> a folder in the layout of a sharded Hugging Face checkpoint, one tensor in memory at a time.

vLLM, SGLang and transformers read it. A safetensors file begins with a table of contents that is known only when its
last tensor has come, so each file keeps room for one, filled up with blanks as the format allows.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import BinaryIO

import torch

from nemo_flashrl.weight_sync.hf_reader import DTYPES, INDEX
from nemo_flashrl.weight_sync.probe import NamedTensors

_HOME, _LOCK = "flashrl-weights-", "lock"
HEADER_BYTES = 2**16  # room for the names of some 500 tensors
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class WeightsHome:
    """A new folder under `parent` for one trainer's weights; those of trainers that were killed are removed first.

    Whoever owns one holds a lock on a file in it for as long as its process lives, in whatever container it does.
    """

    def __init__(self, parent: Path) -> None:
        for other in parent.glob(f"{_HOME}*"):
            _remove_if_abandoned(other)
        staging = parent / f".{_HOME}{secrets.token_hex(8)}"
        staging.mkdir()  # with the umask's mode: a server may be another user's
        self._lock = os.open(staging / _LOCK, os.O_CREAT | os.O_RDWR)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.folder = staging.rename(parent / staging.name[1:])  # nobody sees it before it is locked

    def remove(self) -> None:
        """The folder, and all in it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _remove_if_abandoned(home: Path) -> None:
    try:
        lock = os.open(home / _LOCK, os.O_RDWR)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(home, ignore_errors=True)
    except OSError:  # somebody lives there
        pass
    finally:
        os.close(lock)


async def write_folder(stream: NamedTensors, folder: Path) -> int:
    """Write `stream` into a new `folder`; returns the bytes of its tensors.

    The index is written last: a folder without one is not whole. The event loop gets its turn after every tensor.

    Raises:
        ValueError: a duplicate tensor, or one of a dtype that no weight has.
        Whatever the stream raises, which leaves a folder without an index.
    """
    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    total = 0
    part: _Part | None = None
    try:
        for name, tensor in stream:
            if name in weight_map:
                raise ValueError(f"weights: duplicate tensor {name}")
            if tensor.dtype not in _NAMES:
                raise ValueError(f"weights: {name} is {tensor.dtype}; known are {', '.join(map(str, _NAMES))}")
            if part is None or not part.takes(name, tensor):
                if part is not None:
                    part.close()
                part = _Part(folder / f"model-{len(set(weight_map.values())) + 1:05d}.safetensors", tensor.dtype)
            total += part.write(name, tensor)
            weight_map[name] = part.path.name
            del tensor  # the stream makes the next one; two at a time are the stream's and the one it gathers
            await asyncio.sleep(0)
    finally:
        if part is not None:
            part.close()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))
    return total


class _Part:
    """One file, of tensors of one type, so that all are aligned."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self.path, self._dtype = path, dtype
        self._table: dict[str, dict] = {}
        self._room = HEADER_BYTES - 2
        self._end = 0
        self._file: BinaryIO = path.open("wb")
        self._file.write(HEADER_BYTES.to_bytes(8, "little") + b" " * HEADER_BYTES)

    def takes(self, name: str, tensor: torch.Tensor) -> bool:
        return tensor.dtype == self._dtype and len(_entry(name, self._row(tensor))) <= self._room

    def write(self, name: str, tensor: torch.Tensor) -> int:
        """Append one tensor; returns its bytes."""
        row = self._row(tensor)
        self._room -= len(_entry(name, row))
        self._table[name] = row
        # As bytes, because numpy knows no bf16; a tensor that is on the CPU and contiguous is not copied.
        self._file.write(memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
        size = tensor.numel() * tensor.element_size()
        self._end += size
        return size

    def close(self) -> None:
        self._file.seek(8)
        self._file.write(json.dumps(self._table).encode().ljust(HEADER_BYTES))
        self._file.close()

    def _row(self, tensor: torch.Tensor) -> dict:
        size = tensor.numel() * tensor.element_size()
        return {
            "dtype": _NAMES[self._dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self._end, self._end + size],
        }


def _entry(name: str, row: dict) -> str:
    """What `json.dumps` makes of one row of the table, with its separator."""
    return f"{json.dumps(name)}: {json.dumps(row)}, "
