"""NeMo's configuration -> config.json, for checkpoints that never were Hugging Face's; and whether the two agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemo.collections import llm
from nemo.collections.llm.gpt.model.llama import Llama31Config
from nemo.collections.llm.gpt.model.qwen3 import Qwen3Config, Qwen3MoEConfig

from nemo_flashrl.models.families import FAMILIES, portable_config
from nemo_flashrl.models.rope_scaling import YarnFields, attention_factor
from nemo_flashrl.preflight.model import read_tokenizer

# The most specific class first
MODEL_TYPES: tuple[tuple[type, str], ...] = (
    (llm.MixtralConfig, "mixtral"),
    (Qwen3MoEConfig, "qwen3_moe"),
    (Qwen3Config, "qwen3"),
    (llm.Qwen2Config, "qwen2"),
    (llm.LlamaConfig, "llama"),
)
# NeMo's fields that make another model when they differ
COMPARED = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "add_qkv_bias",
    "qk_layernorm",
    "num_moe_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "share_embeddings_and_output_weights",
    "layernorm_epsilon",
    "rotary_base",
    "seq_len_interpolation_factor",
    "scale_factor",
    "yarn_rotary_scaling_factor",
)


def check_same_model(config: llm.GPTConfig, folder: str | Path) -> None:
    """ValueError names the field in which the Hugging Face folder describes another model than `config`."""
    other = portable_config(folder)
    for name in COMPARED:
        own, given = getattr(config, name, None), getattr(other, name, None)
        if own != given:
            raise ValueError(
                f"{folder}/config.json is of another model: {name} is {given!r}, the checkpoint's is {own!r}"
            )


def model_type(config: llm.GPTConfig) -> str:
    """The family in Hugging Face's words; ValueError lists those that are supported."""
    for base, name in MODEL_TYPES:
        if isinstance(config, base):
            return name
    raise ValueError(
        f"a NeMo model of {type(config).__name__} is not supported; supported: {', '.join(sorted(FAMILIES))} "
        "(nemo_flashrl/models/families.py)"
    )


def write_hf_config(config: llm.GPTConfig, tokenizer_folder: str | Path, folder: Path) -> None:
    """Write config.json and generation_config.json; bos and eos are the tokenizer's.

    NeMo 2.7's exporters answer with a tie flag of false for Qwen2, 40960 positions and fixed bos and eos for Qwen3, and
    know no RoPE scaling but Llama 3's.
    """
    from transformers import AutoConfig, GenerationConfig

    family = model_type(config)
    ids: dict[str, Any] = {}
    vocab_size = config.vocab_size
    if (Path(tokenizer_folder) / "tokenizer_config.json").is_file():
        tokenizer = read_tokenizer(tokenizer_folder)
        ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
        vocab_size = vocab_size or len(tokenizer)
    if vocab_size is None:
        raise ValueError("the checkpoint holds neither vocab_size nor a tokenizer: give --reference")
    fields = {
        "vocab_size": vocab_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_query_groups,
        "head_dim": config.kv_channels,
        "max_position_embeddings": config.seq_length,
        "initializer_range": config.init_method_std,
        "rms_norm_eps": config.layernorm_epsilon,
        "rope_theta": float(config.rotary_base),
        "rope_scaling": _rope_scaling(config),
        "tie_word_embeddings": config.share_embeddings_and_output_weights,
        "torch_dtype": str(config.params_dtype).removeprefix("torch."),
        "architectures": [f"{family.title().replace('_', '')}ForCausalLM"],
        **ids,
        **_expert_fields(config, family),
    }
    folder.mkdir(parents=True, exist_ok=True)
    AutoConfig.for_model(family, **fields).save_pretrained(folder)
    if not (folder / "generation_config.json").is_file():
        GenerationConfig(**ids).save_pretrained(folder)


def _expert_fields(config: llm.GPTConfig, family: str) -> dict[str, Any]:
    if family == "mixtral":
        return {"num_local_experts": config.num_moe_experts, "num_experts_per_tok": config.moe_router_topk}
    if family == "qwen3_moe":
        return {
            "num_experts": config.num_moe_experts,
            "num_experts_per_tok": config.moe_router_topk,
            "moe_intermediate_size": config.moe_ffn_hidden_size,
            "norm_topk_prob": not config.moe_router_pre_softmax,
        }
    return {}


def _rope_scaling(config: llm.GPTConfig) -> dict[str, Any] | None:
    if isinstance(config, Llama31Config):
        return {
            "rope_type": "llama3",
            "factor": float(config.scale_factor),
            "low_freq_factor": float(config.low_freq_factor),
            "high_freq_factor": float(config.high_freq_factor),
            "original_max_position_embeddings": config.old_context_len,
        }
    if isinstance(config, YarnFields):
        return {
            "rope_type": "yarn",
            "factor": config.yarn_rotary_scaling_factor,
            "original_max_position_embeddings": config.yarn_original_max_position_embeddings,
            "beta_fast": config.yarn_beta_fast,
            "beta_slow": config.yarn_beta_slow,
            "attention_factor": attention_factor(config),
            "truncate": config.yarn_correction_range_round_to_int,
        }
    if config.seq_len_interpolation_factor:
        return {"rope_type": "linear", "factor": float(config.seq_len_interpolation_factor)}
    return None
