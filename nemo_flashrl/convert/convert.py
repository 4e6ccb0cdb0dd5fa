"""Whole checkpoints from one format to another, in this process alone; the source is only read.

hf_to_nemo      Hugging Face folder -> Megatron model (weights/mapping.py) -> NeMo folder
nemo_to_hf      NeMo folder -> Megatron model -> Hugging Face folder
run_to_hf       the newest complete checkpoint of a run, or the reference policy in it -> Hugging Face folder
"""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel as MegatronGPTModel
from nemo.collections import llm

from nemo_flashrl import platform
from nemo_flashrl.config.loading import read_plain
from nemo_flashrl.convert.hf_config import check_same_model, write_hf_config
from nemo_flashrl.convert.nemo_folder import (
    CONTEXT,
    PREFIX,
    WEIGHTS,
    is_nemo_folder,
    read_config,
    read_weights,
    weights_dtype,
    write_context,
    write_weights,
)
from nemo_flashrl.models.families import for_this_platform, portable_config, read_hf_config
from nemo_flashrl.run.folder import complete_checkpoints
from nemo_flashrl.weight_sync.hf_reader import HfTensors
from nemo_flashrl.weight_sync.hf_writer import new_folder, refuse_existing
from nemo_flashrl.weights.adapters import write_adapter
from nemo_flashrl.weights.hf_folder import copy_beside_weights, load_hf_folder, run_card, write_hf_folder
from nemo_flashrl.weights.lora import LoraSettings, add_lora
from nemo_flashrl.weights.shards import stream_hf_tensors

REFERENCE_PREFIX = "reference."  # under which callbacks/reference.py keeps its tensors in a run's checkpoint


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Megatron's groups for this process alone, unless there are groups already."""
    if torch.distributed.is_initialized():
        yield
        return
    gc.collect()  # the groups of an earlier call are in cycles with its model, and each keeps threads until it is freed
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(platform.backend(), store=store, rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        platform.seed_model_parallel(0)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def build(config: llm.GPTConfig, dtype: torch.dtype) -> MegatronGPTModel:
    """A Megatron model whose weights are yet to be read."""
    config.params_dtype, config.bf16, config.fp16 = dtype, dtype == torch.bfloat16, dtype == torch.float16
    config.perform_initialization = False
    model = for_this_platform(config).configure_model(tokenizer=None)
    return model.to(platform.device(), dtype).eval()  # torch's norms are made in fp32


def hf_to_nemo(source: str | Path, target: str | Path) -> Path:
    """Raises ValueError for a source that is not whole or not supported, and for a target that exists."""
    dtype = hf_dtype(source)
    config = portable_config(source, dtype)
    with new_folder(target) as staging, alone():
        model = build(portable_config(source), dtype)
        load_hf_folder(model, source, model.config.vocab_size)
        write_weights(model, staging)
        write_context(config, source, staging)
    return Path(target)


def hf_dtype(folder: str | Path) -> torch.dtype:
    """Of the tensors; where they differ, the one that holds them all."""
    tensors = HfTensors(folder)
    dtypes = {tensors.dtype(name) for name in tensors.names()}
    widest = next(iter(dtypes))
    for dtype in dtypes:
        widest = torch.promote_types(widest, dtype)
    if not widest.is_floating_point:
        raise ValueError(f"{folder} holds tensors of {widest}: quantised checkpoints are not supported")
    return widest


def nemo_to_hf(source: str | Path, target: str | Path, reference: str | Path | None = None) -> Path:
    """Export a NeMo checkpoint folder.

    Configuration, tokenizer and generation settings are those of the Hugging Face folder `reference`, or of the one
    that the checkpoint was imported from, whose files travel in it; without either they are written from NeMo's
    configuration.

    Raises:
        ValueError: the source is not whole, is of another model than `reference`, or the target exists.
    """
    source = Path(source)
    refuse_existing(target)
    if not is_nemo_folder(source):
        raise ValueError(f"{source} is not a NeMo checkpoint: it holds no {WEIGHTS}/ and {CONTEXT}/")
    with tempfile.TemporaryDirectory() as temporary, alone():
        files = Path(reference) if reference is not None else hf_files_of(source, Path(temporary))
        check_same_model(read_config(source), files)
        model = build(portable_config(files), weights_dtype(source / WEIGHTS))
        read_weights(model, source / WEIGHTS)
        _export(model, files, target, {"name": Path(target).name, "converted from": source.name})
    return Path(target)


def hf_files_of(source: Path, temporary: Path) -> Path:
    """Where configuration and tokenizer of a NeMo checkpoint are: the imported files, or written to `temporary`."""
    kept = sorted(path.parent for path in (source / CONTEXT).glob("*/*config.json"))
    if any((folder / "config.json").is_file() for folder in kept):
        return next(folder for folder in kept if (folder / "config.json").is_file())
    for folder in kept:
        copy_beside_weights(folder, temporary)
    write_hf_config(read_config(source), temporary, temporary)
    return temporary


def _export(model: MegatronGPTModel, files: Path, target: str | Path, card: Mapping[str, Any]) -> None:
    write_hf_folder(stream_hf_tensors(model, read_hf_config(files)["vocab_size"]), files, target, card)


def run_to_hf(run: str | Path, target: str | Path, which: str = "policy") -> Path:
    """Export from a run's newest complete checkpoint.

    Args:
        which: "policy", a LoRA adapter merged in; "reference", the reference policy in the policy's dtype; "adapter",
            the LoRA adapter alone in PEFT's format.

    Raises:
        ValueError: no run, no complete checkpoint, nothing of the kind in it, or the target exists.
    """
    run = Path(run)
    refuse_existing(target)
    if not (run / "config.yaml").is_file():
        raise ValueError(f"{run} holds no config.yaml: give the output folder of a run")
    configuration = read_plain(run / "config.yaml")
    step, checkpoint = max(complete_checkpoints(run / "checkpoints").items(), default=(0, None))
    if checkpoint is None:
        raise ValueError(f"{run / 'checkpoints'} holds no complete checkpoint")
    files, weights = _hf_files_of(run, configuration), checkpoint / WEIGHTS
    lora = configuration.get("lora") or {"rank": 0}
    if which == "adapter" and not lora["rank"]:
        raise ValueError(f"{run} was trained without LoRA: it has no adapter")
    dtype = weights_dtype(weights)
    with alone():
        model = build(portable_config(files), torch.float32 if which == "reference" else dtype)
        if lora["rank"]:
            add_lora(model, LoraSettings(**lora))
        read_weights(model, weights, REFERENCE_PREFIX if which == "reference" else PREFIX)
        if which == "adapter":
            write_adapter(model, configuration["model"]["path"], target)
        else:
            _export(model.to(dtype), files, target, {**run_card(configuration, step), "weights": which})
    return Path(target)


def _hf_files_of(run: Path, configuration: Mapping[str, Any]) -> Path:
    """Where configuration and tokenizer of the run's model are: where it started, or its own export."""
    for folder in (Path(configuration["model"]["path"]), run / "checkpoint"):
        if (folder / "config.json").is_file():
            return folder
    raise ValueError(f"{configuration['model']['path']}, which the run started from, is gone: put it back")
