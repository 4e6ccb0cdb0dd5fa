"""Attention for machines without Transformer Engine: torch's own kernels, one causal block a trajectory.

Megatron's local attention materialises all scores and knows no packed rows; this one does neither, so that the packed
layout is the same code path on a CPU as on a GPU.

Legend: S = row length, R = rows, T = tokens of a packed row, A = attention heads of this rank, G = key/value heads,
D = head size.
"""

from __future__ import annotations

import contextlib

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from nemo.collections.llm.gpt.model.base import GPTConfig, local_layer_spec
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def segment_layer_spec(config: GPTConfig) -> ModuleSpec:
    """NeMo's local layer with this attention in it."""
    spec = local_layer_spec(config)
    spec.submodules.self_attention.submodules.core_attention = SegmentAttention
    return spec


class SegmentAttention(DotProductAttention):
    """Causal self-attention over padded rows [S, R, A, D] or over the segments of one packed row [T, A, D]."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Returns [S, R, A * D], or [T, A * D] for a packed row."""
        assert attention_mask is None and attention_bias is None, "causal attention without a mask is all it knows"
        if packed_seq_params is None:
            rows = [tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)]  # [R, A or G, S, D]
            return self._attend(*rows).permute(2, 0, 1, 3).flatten(2)
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        lengths = [end - begin for begin, end in zip(bounds[:-1], bounds[1:], strict=True)]
        segments = zip(*(tensor.split(lengths) for tensor in (query, key, value)), strict=True)
        attended = [self._attend(*(part.transpose(0, 1)[None] for part in parts))[0] for parts in segments]
        return torch.cat([part.transpose(0, 1) for part in attended]).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        dropout = self.config.attention_dropout if self.training else 0.0
        with get_cuda_rng_tracker().fork() if dropout else contextlib.nullcontext():  # heads differ from rank to rank
            return scaled_dot_product_attention(
                query,
                key,
                value,
                is_causal=True,
                dropout_p=dropout,
                scale=self.softmax_scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
