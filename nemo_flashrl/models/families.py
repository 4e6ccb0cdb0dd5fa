"""A Hugging Face configuration -> the NeMo configuration of the same family.

NeMo's own importers read the file; what they leave out is put right here, in one place, with the reason.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from nemo.collections import llm

from nemo_flashrl import platform
from nemo_flashrl.models.segment_attention import segment_layer_spec

# model_type in config.json -> NeMo's importer, which knows the family's configuration class
IMPORTERS = {
    "llama": llm.gpt.model.llama.HFLlamaImporter,
    "qwen2": llm.gpt.model.qwen2.HFQwen2Importer,
    "qwen3": llm.gpt.model.qwen3.HFQwen3Importer,
    "mixtral": llm.gpt.model.mixtral.HFMixtralImporter,
}


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """The folder's config.json; a missing or unsupported one is a ValueError that names it."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"model.path={str(folder)!r} holds no config.json: give a Hugging Face checkpoint folder")
    config = json.loads(path.read_text())
    if config.get("model_type") not in IMPORTERS:
        raise ValueError(
            f"model.path={str(folder)!r} has model_type {config.get('model_type')!r}; "
            f"supported: {', '.join(sorted(IMPORTERS))} (one entry in nemo_flashrl/models/families.py adds a family)"
        )
    return config


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel: int) -> int:
    """Rows of the embedding matrix: the next multiple that every tensor rank can take an equal share of."""
    multiple = divisible_by * tensor_parallel
    return -(-vocab_size // multiple) * multiple


def nemo_config(
    folder: str | Path,
    *,
    context_length: int,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    vocab_divisible_by: int = 128,
    dtype: torch.dtype = torch.float32,
    recompute: str = "none",
) -> llm.GPTConfig:
    """The NeMo model configuration of a Hugging Face checkpoint folder, ready for this platform.

    Raises ValueError for a family that is not supported and for RoPE scaling that NeMo's class cannot express.
    """
    source = read_hf_config(folder)
    importer = IMPORTERS[source["model_type"]](str(folder))
    importer.trust_remote_code = False
    config = importer.config
    # NeMo 2.7 importers: Qwen2 drops the tie flag, Qwen3 ignores head_dim, all preset an unpadded vocab_size.
    config.share_embeddings_and_output_weights = bool(source.get("tie_word_embeddings", False))
    if source.get("head_dim"):
        config.kv_channels = source["head_dim"]
    config.vocab_size = padded_vocab_size(source["vocab_size"], vocab_divisible_by, tensor_parallel)
    config.seq_length = context_length
    config.params_dtype, config.bf16, config.fp16 = dtype, dtype == torch.bfloat16, False
    # Microbatches differ in shape, so pipeline stages exchange shapes; Megatron refuses that beside its default
    # token dispatcher, in dense models too.
    config.variable_seq_lengths = pipeline_parallel > 1
    config.moe_token_dispatcher_type = "alltoall"
    config.recompute_granularity = None if recompute == "none" else recompute
    if recompute == "full":
        config.recompute_method, config.recompute_num_layers = "uniform", 1
    _check_rope(source)
    if not platform.has_gpu():  # Transformer Engine's layers need one
        config.transformer_layer_spec = segment_layer_spec
    for name, value in platform.model_overrides().items():
        setattr(config, name, value)
    return config


def _check_rope(source: dict[str, Any]) -> None:
    scaling = source.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    supported = {"llama": {"default", "llama3"}}.get(source["model_type"], {"default"})
    if kind not in supported:
        raise ValueError(
            f"rope_scaling.rope_type={kind!r} of a {source['model_type']} model is not supported; "
            f"supported: {', '.join(sorted(supported))}"
        )
