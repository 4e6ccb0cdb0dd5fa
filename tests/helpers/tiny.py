"""Small random Hugging Face checkpoints and trajectories for the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from nemo_flashrl.records import Trajectory

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 24,
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),  # heads x head_dim is not hidden_size
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
    ),
}


def write_model(
    folder: Path,
    family: str = "qwen2",
    *,
    vocab_size: int = 515,
    tied: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Path:
    """A random checkpoint; biases and norms are random too, so that a lost or swapped one shows.

    `fields` replace those of the family's config.json.
    """
    config_class, model_class, extra = FAMILIES[family]
    torch.manual_seed(seed)
    model = model_class(
        config_class(**{"vocab_size": vocab_size, "tie_word_embeddings": tied, **SIZES, **extra, **fields})
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.generation_config.save_pretrained(folder)
    model.to(dtype).save_pretrained(folder)
    return folder


def random_trajectories(count: int, vocab_size: int, seed: int = 0, group_size: int = 1) -> tuple[Trajectory, ...]:
    """Trajectories of 6 to 60 tokens, several action spans each, rewards 0 or 1, log-probs near ln(1 / vocab_size)."""
    rng = np.random.default_rng(seed)
    out = []
    for index in range(count):
        length = int(rng.integers(6, 60))
        mask = rng.random(length) < 0.5
        mask[0], mask[3] = False, True
        logprobs = np.where(mask, -np.log(vocab_size) + rng.normal(0, 0.02, length), 0).astype(np.float32)
        out.append(
            Trajectory(
                prompt_index=index,
                group=index // group_size,
                token_ids=rng.integers(0, vocab_size, length),
                action_mask=mask,
                behavior_logprobs=logprobs,
                versions=np.where(mask, 0, -1).astype(np.int32),
                reward=float(rng.random() < 0.5),
                turns=2,
                end_reason="done",
                failed=bool(rng.random() < 0.5),
            )
        )
    return tuple(out)
