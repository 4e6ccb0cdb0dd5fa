"""RoPE scaling of a Hugging Face configuration in NeMo's terms.

linear   seq_len_interpolation_factor of every GPTConfig
llama3   NeMo's Llama31Config, which has the four numbers
yarn     Megatron's YarnRotaryEmbedding; NeMo's classes of these families lack its fields, those below have them
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from nemo.collections import llm
from nemo.collections.llm.gpt.model.qwen3 import Qwen3Config, Qwen3MoEConfig


@dataclass
class YarnFields:
    """Peng et al. 2023; what megatron.core.models.gpt.GPTModel reads of its configuration."""

    position_embedding_type: str = "yarn"
    yarn_rotary_scaling_factor: float = 1.0
    yarn_original_max_position_embeddings: int = 4096
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_mscale: float = 1.0
    yarn_mscale_all_dim: float = 0.0
    yarn_correction_range_round_to_int: bool = True


@dataclass
class YarnLlamaConfig(YarnFields, llm.LlamaConfig):
    """Llama with YaRN."""


@dataclass
class YarnQwen2Config(YarnFields, llm.Qwen2Config):
    """Qwen 2 and 2.5 with YaRN."""


@dataclass
class YarnQwen3Config(YarnFields, Qwen3Config):
    """Qwen 3 with YaRN."""


@dataclass
class YarnQwen3MoEConfig(YarnFields, Qwen3MoEConfig):
    """Qwen 3 with experts and YaRN."""


@dataclass
class YarnMixtralConfig(YarnFields, llm.MixtralConfig):
    """Mixtral with YaRN."""


_WITH_YARN = (YarnQwen3MoEConfig, YarnQwen3Config, YarnQwen2Config, YarnMixtralConfig, YarnLlamaConfig)


def rope_kind(source: dict[str, Any]) -> str:
    """`rope_type` of a config.json; older files call it `type`."""
    scaling = source.get("rope_scaling") or {}
    return scaling.get("rope_type", scaling.get("type", "default"))


def with_rope_scaling(config: llm.GPTConfig, source: dict[str, Any]) -> llm.GPTConfig:
    """`config` with the scaling of `source`, in place or of the class that has the fields."""
    kind, scaling = rope_kind(source), source.get("rope_scaling") or {}
    if kind == "linear":
        config.seq_len_interpolation_factor = float(scaling["factor"])
    if kind == "llama3":  # NeMo 2.7's importer takes the factor alone
        config.scale_factor = float(scaling["factor"])
        config.low_freq_factor = float(scaling["low_freq_factor"])
        config.high_freq_factor = float(scaling["high_freq_factor"])
        config.old_context_len = int(scaling["original_max_position_embeddings"])
    if kind != "yarn":
        return config
    factor = float(scaling["factor"])
    original = scaling.get("original_max_position_embeddings") or source["max_position_embeddings"]
    base = next(c for c in _WITH_YARN if isinstance(config, c.__mro__[2]))
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}
    fields |= {
        "position_embedding_type": "yarn",
        "apply_rope_fusion": False,  # the fused kernel knows no attention factor
        "yarn_rotary_scaling_factor": factor,
        "yarn_original_max_position_embeddings": int(original),
        "yarn_beta_fast": float(scaling.get("beta_fast") or 32),
        "yarn_beta_slow": float(scaling.get("beta_slow") or 1),
        "yarn_mscale": _mscale(scaling, factor),
        "yarn_correction_range_round_to_int": bool(scaling.get("truncate", True)),
    }
    known = {field.name for field in dataclasses.fields(base)}
    return base(**{name: value for name, value in fields.items() if name in known})


def _mscale(scaling: dict[str, Any], factor: float) -> float:
    """The m of Megatron's attention factor 0.1 m ln(factor) + 1 that gives the one of the checkpoint."""
    log = math.log(factor) if factor > 1 else 0.0
    wanted = scaling.get("attention_factor")
    if wanted is None and scaling.get("mscale") and scaling.get("mscale_all_dim"):
        wanted = (0.1 * scaling["mscale"] * log + 1) / (0.1 * scaling["mscale_all_dim"] * log + 1)
    if wanted is None:
        return 1.0
    if not log and wanted != 1:
        raise ValueError(f"rope_scaling.attention_factor={wanted}: needs a factor above 1, not {factor:g}")
    return (wanted - 1) / (0.1 * log) if log else 1.0


def attention_factor(config: YarnFields) -> float:
    """What Megatron multiplies rotated queries and keys by."""
    log = math.log(max(config.yarn_rotary_scaling_factor, 1.0))
    return (0.1 * config.yarn_mscale * log + 1) / (0.1 * config.yarn_mscale_all_dim * log + 1)
