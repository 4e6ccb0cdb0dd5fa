"""Which features that the configuration asks for are active in the built model."""

from __future__ import annotations

import os

import torch

from nemo_flashrl import platform
from nemo_flashrl.weights.shards import unwrap


def active_features(model: torch.nn.Module) -> dict[str, float]:
    """1 or 0 for recomputation, and on a GPU for flash attention, of this pipeline stage's layers in training.

    Transformer Engine chooses its kernel at run time; both of the fast ones can be forbidden by the environment.
    """
    decoder = unwrap(model).decoder
    numbers = {"recompute_active": float(bool(decoder.config.recompute_granularity) and decoder.training)}
    if platform.has_gpu() and len(decoder.layers):
        attention = type(decoder.layers[0].self_attention.core_attention).__name__
        allowed = any(os.environ.get(name, "1") != "0" for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN"))
        numbers["flash_attention_active"] = float(attention == "TEDotProductAttention" and allowed)
    return numbers
