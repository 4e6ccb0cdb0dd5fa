"""Folders in the layout of Hugging Face and of PEFT, which appear whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from nemo_flashrl.weight_sync.hf_reader import INDEX, SINGLE

MAX_SHARD_BYTES = 5 * 2**30  # transformers' own default


@contextlib.contextmanager
def new_folder(target: str | Path) -> Iterator[Path]:
    """Yield an empty folder beside `target`, which takes that name when the block ends well and goes when it fails.

    Its name is used once: two writers never meet, and of two that want the same target the second is refused.

    Raises:
        ValueError: the target exists, or the file system refuses to write.
    """
    target = Path(target)
    refuse_existing(target)
    staging = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        staging.mkdir(parents=True)
        yield staging
        refuse_existing(target)
        staging.rename(target)
    except OSError as error:
        if target.exists():  # another writer came between the check and the renaming
            refuse_existing(target)
        raise ValueError(f"{target} could not be written ({error}) and was removed") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def refuse_existing(target: str | Path) -> None:
    """ValueError if there is something of that name."""
    if Path(target).exists():
        raise ValueError(f"{target} exists: an export never overwrites; choose another folder or remove it")


def write_tensors(stream: Iterable[tuple[str, Tensor]], folder: Path) -> set[torch.dtype]:
    """Write a stream into `folder`, in several files with an index where they are more than `MAX_SHARD_BYTES`.

    Returns:
        The dtypes that were written.

    Raises:
        ValueError: a tensor holds NaN or inf; told at the stream's end, which other ranks wait for.
    """
    dtypes: set[torch.dtype] = set()
    broken: list[str] = []
    weight_map: dict[str, int] = {}
    part: dict[str, Tensor] = {}
    part_bytes = total_bytes = part_number = 0
    for name, tensor in stream:
        if not tensor.isfinite().all():
            broken.append(name)
        size = tensor.numel() * tensor.element_size()
        if part and part_bytes + size > MAX_SHARD_BYTES:
            _save(part, folder / f"part-{part_number}")
            part, part_bytes, part_number = {}, 0, part_number + 1
        part[name] = tensor.to("cpu", copy=True).contiguous()
        dtypes.add(tensor.dtype)
        weight_map[name] = part_number
        part_bytes += size
        total_bytes += size
    if broken:
        more = f" (and {len(broken) - 1} more)" if broken[1:] else ""
        raise ValueError(f"NaN or inf in {broken[0]}{more}: broken weights are not exported")
    _save(part, folder / f"part-{part_number}")
    if part_number == 0:
        (folder / "part-0").rename(folder / SINGLE)
        return dtypes
    names = [f"model-{n + 1:05d}-of-{part_number + 1:05d}.safetensors" for n in range(part_number + 1)]
    for number, file_name in enumerate(names):
        (folder / f"part-{number}").rename(folder / file_name)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": {k: names[n] for k, n in weight_map.items()}}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return dtypes


def write_peft(
    factors: Mapping[str, Tensor], folder: Path, *, alpha: float | None = None, base: str | None = None
) -> None:
    """Write LoRA factors under PEFT's names into `folder`, for the model `base`.

    `alpha` None says that alpha / rank is multiplied in already.

    Raises:
        ValueError: one of them is not finite.
    """
    for name, factor in factors.items():
        if not factor.isfinite().all():
            raise ValueError(f"weights: {name} is not finite")
    rank = next(factor.shape[0] for name, factor in factors.items() if ".lora_A." in name)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": rank if alpha is None else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.split(".")[-3] for name in factors}),
        "inference_mode": True,
    }
    tensors = {name: factor.detach().to("cpu", copy=True).contiguous() for name, factor in factors.items()}
    _save(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    path.touch()
    mode = path.stat().st_mode  # by the umask; safetensors puts a file for its owner alone in this one's place
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # the file system's own error, as text
        raise OSError(str(error)) from error
    path.chmod(mode)
