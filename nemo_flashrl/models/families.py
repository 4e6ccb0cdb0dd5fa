"""A Hugging Face configuration -> the NeMo configuration of the same family.

NeMo's own importers read the file; what they leave out or get wrong is put right here, in one place, with the
reason. A family is one entry of FAMILIES, and one of `EXPERTS` in weights/mapping.py where it has experts.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from nemo.collections import llm
from nemo.collections.llm.gpt.model.qwen3 import HFQwen3Importer, Qwen3Model

from nemo_flashrl import platform
from nemo_flashrl.models.rope_scaling import rope_kind, with_rope_scaling
from nemo_flashrl.models.segment_attention import segment_layer_spec
from nemo_flashrl.weight_sync.hf_config import read_config, read_hf_json


@dataclass(frozen=True)
class Family:
    """What NeMo has for a `model_type` of config.json."""

    importer: type  # knows the family's configuration class
    model: type  # what a NeMo checkpoint of the family is loaded as
    rope_scaling: tuple[str, ...]


FAMILIES = {
    "llama": Family(llm.gpt.model.llama.HFLlamaImporter, llm.LlamaModel, ("default", "linear", "llama3", "yarn")),
    "qwen2": Family(llm.gpt.model.qwen2.HFQwen2Importer, llm.Qwen2Model, ("default", "linear", "yarn")),
    "qwen3": Family(HFQwen3Importer, Qwen3Model, ("default", "linear", "yarn")),
    "qwen3_moe": Family(HFQwen3Importer, Qwen3Model, ("default", "linear", "yarn")),
    "mixtral": Family(llm.gpt.model.mixtral.HFMixtralImporter, llm.MixtralModel, ("default", "linear", "yarn")),
}
# Fields of config.json that change the computation, with the only value that Megatron's layers here compute.
FIXED = {
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "use_sliding_window": False,
    "attention_bias": False,
    "mlp_bias": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "quantization_config": None,
}


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        ValueError: it is missing, of a family that is not supported, or says what the family's NeMo class cannot do.
    """
    path, config = Path(folder) / "config.json", read_config(folder)
    family = FAMILIES.get(config.get("model_type"))
    if family is None:
        raise ValueError(
            f"model.path={str(folder)!r} has model_type {config.get('model_type')!r}; "
            f"supported: {', '.join(sorted(FAMILIES))} (one entry in nemo_flashrl/models/families.py adds a family)"
        )
    for name, only in FIXED.items():
        if (config.get(name) or only) != only:
            raise ValueError(f"{path}: {name}={config[name]!r} is not supported, {only!r} alone is")
    if config["model_type"] == "mixtral" and config.get("sliding_window") is not None:
        raise ValueError(f"{path}: sliding_window={config['sliding_window']!r} is not supported, null alone is")
    if rope_kind(config) not in family.rope_scaling:
        raise ValueError(
            f"{path}: rope_scaling.rope_type={rope_kind(config)!r} of a {config['model_type']} model is not "
            f"supported; supported: {', '.join(family.rope_scaling)}"
        )
    return config


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel: int) -> int:
    """Rows of the embedding matrix: the next multiple that every tensor rank can take an equal share of."""
    multiple = divisible_by * tensor_parallel
    return -(-vocab_size // multiple) * multiple


def portable_config(folder: str | Path, dtype: torch.dtype = torch.float32) -> llm.GPTConfig:
    """The NeMo configuration of a Hugging Face folder, for no platform and no parallel sizes in particular."""
    source = read_hf_config(folder)
    config = _imported(FAMILIES[source["model_type"]].importer, Path(folder))
    # NeMo 2.7 importers: Qwen2 drops the tie flag, Qwen3 ignores head_dim and the experts, and the length of the
    # positions is kept by some alone.
    config.share_embeddings_and_output_weights = bool(source.get("tie_word_embeddings", False))
    if source.get("head_dim"):
        config.kv_channels = source["head_dim"]
    config.seq_length = source.get("max_position_embeddings", config.seq_length)
    if source["model_type"] == "qwen3_moe":
        config.num_moe_experts = source["num_experts"]
        config.moe_router_topk = source["num_experts_per_tok"]
        # Probabilities over the chosen experts alone are those of a softmax after the choice.
        config.moe_router_pre_softmax = not source.get("norm_topk_prob", False)
    config.vocab_size = source["vocab_size"]
    config.params_dtype, config.bf16, config.fp16 = dtype, dtype == torch.bfloat16, dtype == torch.float16
    return with_rope_scaling(config, source)


def _imported(importer: type, folder: Path) -> llm.GPTConfig:
    """As NeMo's importer reads it, from a folder that has what it insists on and a name that tells it nothing.

    NeMo 2.7 fails without a generation_config.json or a dtype, and takes another class where the path holds "8x22b".
    """
    with tempfile.TemporaryDirectory() as copy:
        config = read_config(folder)
        if not (config.get("dtype") or config.get("torch_dtype")):
            config["torch_dtype"] = "float32"
        (Path(copy) / "config.json").write_text(json.dumps(config))
        generation = folder / "generation_config.json"
        found = read_hf_json(generation) if generation.is_file() else {}
        (Path(copy) / "generation_config.json").write_text(json.dumps(found))
        reader = importer(copy)
        reader.trust_remote_code = False
        return reader.config


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
    config = portable_config(folder, dtype)
    config.vocab_size = padded_vocab_size(config.vocab_size, vocab_divisible_by, tensor_parallel)
    config.seq_length = context_length
    # Microbatches differ in shape, so pipeline stages exchange shapes; Megatron refuses that beside its default
    # token dispatcher, in dense models too.
    config.variable_seq_lengths = pipeline_parallel > 1
    config.moe_token_dispatcher_type = "alltoall"
    # A balancing loss would be weighed against the policy's by the number of microbatches.
    config.moe_router_load_balancing_type, config.moe_aux_loss_coeff = "none", 0.0
    config.recompute_granularity = None if recompute == "none" else recompute
    if recompute == "full":
        config.recompute_method, config.recompute_num_layers = "uniform", 1
    return for_this_platform(config)


def for_this_platform(config: llm.GPTConfig) -> llm.GPTConfig:
    """`config`, changed in place where the platform decides."""
    if not platform.has_gpu():  # Transformer Engine's layers and grouped products need one
        config.transformer_layer_spec = segment_layer_spec
        config.moe_grouped_gemm = config.moe_permute_fusion = False
    else:
        # NeMo asks for these in some of its families alone. Without them a GPU multiplies expert by expert, waits for
        # the host in each layer to rotate packed rows, and keeps five tensors of an MLP's width instead of three.
        config.moe_grouped_gemm = config.moe_permute_fusion = bool(config.num_moe_experts)
        config.apply_rope_fusion = config.position_embedding_type != "yarn"
        config.bias_activation_fusion = config.bias_dropout_fusion = True
    for name, value in platform.model_overrides().items():
        setattr(config, name, value)
    return config
