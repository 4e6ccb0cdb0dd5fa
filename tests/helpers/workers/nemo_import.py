"""NeMo's own `llm.import_ckpt`, on a machine without Transformer Engine, and what the package makes of its folders."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import nemo.lightning as nl
from nemo.collections import llm
from nemo.lightning import io

from nemo_flashrl.models.families import FAMILIES, portable_config, read_hf_config
from workers import convert

# Transformer Engine's names of the norms, which is all that NeMo's importers know -> those of Megatron's own layers.
# In a checkpoint both have Transformer Engine's.
LOCAL_NAMES = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


def main(out: Path, sources: list[tuple[Path, Path]], *calls: tuple) -> None:
    """Each source is (Hugging Face folder, NeMo folder to come); then `calls` as in workers/convert.py."""
    nl.MegatronStrategy = functools.partial(nl.MegatronStrategy, ckpt_async_save=False)  # it would ask for a GPU
    io.apply_transforms = functools.partial(_with_local_names, io.apply_transforms)
    for source, target in sources:
        kind = FAMILIES[read_hf_config(source)["model_type"]].model  # the importer reads the configuration itself
        llm.import_ckpt(kind(portable_config(source)), f"hf://{source}", output_path=target)
    convert.main(out, *calls)


def _with_local_names(apply: Any, source: Any, target: Any, mapping: dict[str, str], **more: Any) -> Any:
    for name, local in LOCAL_NAMES.items():
        mapping = {theirs: own.replace(name, local) for theirs, own in mapping.items()}
    return apply(source, target, mapping=mapping, **more)
