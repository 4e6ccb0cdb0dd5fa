"""NeMo's checkpoint folder: `weights/`, a Megatron distributed checkpoint, and `context/`, how to build the model.

    context/io.json, model.yaml     what nemo.lightning.io.load_context reads
    context/nemo_tokenizer/         tokenizer files, as NeMo keeps them; here config.json and the like travel too
    weights/                        what `llm` and AutoResume load, at any parallel sizes

Written by Megatron and NeMo themselves; what goes in comes from weights/mapping.py, not from NeMo's importers.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.models.gpt import GPTModel as MegatronGPTModel
from nemo.collections import llm
from torch.distributed.checkpoint.api import CheckpointException

from nemo_flashrl.models.families import FAMILIES, read_hf_config
from nemo_flashrl.weights.hf_folder import CHAT_TEMPLATES, copy_beside_weights

WEIGHTS, CONTEXT = "weights", "context"
HF_FILES = "nemo_tokenizer"
PREFIX = "module."  # NeMo's wrapper around Megatron's model
# What NeMo 2.7's strategy says of the checkpoints that it writes
METADATA = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
# Fields that the platform changes when a configuration is made; the class's own values belong in a checkpoint.
OF_THE_PLATFORM = {"apply_rope_fusion", "persist_layer_norm", "moe_permute_fusion", "use_cpu_initialization"}


def is_nemo_folder(folder: str | Path) -> bool:
    """Whether it has the two parts of a NeMo checkpoint."""
    return (Path(folder) / WEIGHTS).is_dir() and (Path(folder) / CONTEXT).is_dir()


def write_weights(model: MegatronGPTModel, folder: Path) -> None:
    """Write this rank's shard to `folder`/weights; OSError where that fails. A collective."""
    weights = folder / WEIGHTS
    weights.mkdir()
    state = {
        "sharded_state_dict": model.sharded_state_dict(prefix=PREFIX, metadata=METADATA),
        "state_dict": {},
        "epoch": 0,
        "global_step": 0,
    }
    try:
        dist_checkpointing.save(state, str(weights), content_metadata=METADATA)
    except (CheckpointException, CheckpointingException) as error:
        raise OSError(_reason(error)) from error


def read_weights(model: MegatronGPTModel, weights: Path, prefix: str = PREFIX) -> None:
    """Fill this rank's shard from a distributed checkpoint, in place. A collective.

    Raises:
        ValueError: it cannot be read, lacks a weight of the model, or holds one under `prefix` that the model lacks.
    """
    try:
        metadata = dist_checkpointing.load_content_metadata(str(weights)) or METADATA
        state = model.sharded_state_dict(prefix=PREFIX, metadata=metadata)
        state = {name: part for name, part in state.items() if not part.key.endswith("_extra_state")}
        for part in state.values():
            part.key = part.key.replace(PREFIX, prefix, 1)
        _check_names(state, weights, prefix)
        dist_checkpointing.load(state, str(weights))
    except (CheckpointException, CheckpointingException, OSError, EOFError) as error:
        raise ValueError(f"{weights} cannot be read ({_reason(error)}): copy it again") from error


def _check_names(state: dict[str, ShardedBase], weights: Path, prefix: str) -> None:
    held = {
        name
        for name in dist_checkpointing.load_tensors_metadata(str(weights))
        if name.startswith(prefix) and not name.endswith("_extra_state")
    }
    wanted = {part.key for part in state.values()}
    for name in sorted(wanted - held):
        raise ValueError(f"{weights} holds no {name!r}: the checkpoint is of another model")
    for name in sorted(held - wanted):
        raise ValueError(f"{weights} holds {name!r}, which no parameter of the model takes")


def weights_dtype(weights: Path) -> torch.dtype:
    """Of the embedding, and so of the model."""
    try:
        tensors = dist_checkpointing.load_tensors_metadata(str(weights))
    except (CheckpointException, CheckpointingException, OSError, EOFError) as error:
        raise ValueError(
            f"{weights} is not a complete Megatron checkpoint ({_reason(error)}): copy it again"
        ) from error
    embedding = tensors.get(f"{PREFIX}embedding.word_embeddings.weight")
    if embedding is None:
        raise ValueError(f"{weights} holds no {PREFIX}embedding.word_embeddings.weight: it is not a language model's")
    return embedding.dtype


def _reason(error: Exception) -> str:
    """The failure that torch wraps once for every rank, or the error itself, on one line."""
    failures = getattr(error, "failures", None) or {}
    first = next(iter(failures.values()), (error, None))[0]
    return f"{type(first).__name__}: {' '.join(str(first).split())}"


def write_context(config: llm.GPTConfig, source: str | Path, folder: Path) -> None:
    """Write `folder`/context for a model of `config`, with the files of the Hugging Face folder `source`."""
    import nemo.lightning as nl
    from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer
    from nemo.lightning.io.pl import TrainerContext

    family = FAMILIES[read_hf_config(source)["model_type"]]
    with tempfile.TemporaryDirectory() as temporary:
        files = Path(temporary) / HF_FILES
        files.mkdir()
        copy_beside_weights(source, files)
        templates = files / CHAT_TEMPLATES
        if templates.is_dir():  # NeMo copies the files of a folder, and no folder in it
            templates = templates.rename(Path(temporary) / CHAT_TEMPLATES)
        has_tokenizer = (files / "tokenizer_config.json").is_file()
        model = family.model(_as_written(config), tokenizer=AutoTokenizer(str(files)) if has_tokenizer else None)
        trainer = nl.Trainer(
            devices=1,
            accelerator="cpu",
            strategy=nl.MegatronStrategy(ckpt_save_optimizer=False, always_save_context=True),
        )
        TrainerContext(model=model, trainer=trainer, extra={}).io_dump(folder / CONTEXT, yaml_attrs=["model"])
        if not has_tokenizer:  # NeMo then copies nothing
            files.rename(folder / CONTEXT / HF_FILES)
        if templates.is_dir():
            shutil.copytree(templates, folder / CONTEXT / HF_FILES / CHAT_TEMPLATES)


def _as_written(config: llm.GPTConfig) -> llm.GPTConfig:
    """The same configuration by its constructor alone, which is what NeMo records of an object."""
    given: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.init and field.name not in OF_THE_PLATFORM and value != _default(field):
            given[field.name] = value
    try:
        given["generation_config"].validate(strict=True)
    except (KeyError, ValueError):  # NeMo 2.7 would pass over that it cannot be saved, and then not load
        given["generation_config"] = None
    return type(config)(**given)


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def read_config(folder: str | Path) -> llm.GPTConfig:
    """The model's configuration in a NeMo checkpoint; ValueError names what cannot be read."""
    from nemo.lightning.io.api import load_context

    try:
        return load_context(Path(folder), subpath="model.config")
    except (OSError, ValueError, AttributeError, ImportError, TypeError) as error:
        raise ValueError(f"{folder}/{CONTEXT} describes no model that NeMo can build ({error})") from error
