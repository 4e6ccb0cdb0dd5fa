"""Attention for machines without Transformer Engine: torch's own kernels, one causal block a trajectory.

Megatron's local attention materialises all scores and knows neither packed rows nor context parallelism; with this
one both layouts are the same code path on a CPU as on a GPU. Under context parallelism each rank gathers the keys and
values of whole sequences and attends with the queries that it holds.

Legend: S = row length, R = rows, T = tokens of a packed row, each the share of this context-parallel rank; A =
attention heads of this rank, G = key/value heads, D = head size, CP = context-parallel size.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, get_cuda_rng_tracker
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from nemo.collections.llm.gpt.model.base import GPTConfig, local_layer_spec
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nemo_flashrl.data.context_parallel import held_positions


def segment_layer_spec(config: GPTConfig) -> ModuleSpec:
    """NeMo's local layer with this attention in it."""
    spec = local_layer_spec(config)
    spec.submodules.self_attention.submodules.core_attention = SegmentAttention
    if config.num_moe_experts:
        # Names in distributed checkpoints are Transformer Engine's, whose layers of experts keep this norm apart;
        # Megatron 0.15 renames it here all the same.
        spec.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.")
    return spec


class SegmentAttention(DotProductAttention):
    """Causal self-attention over padded rows [S, R, A, D] or over the segments of one packed row [T, A, D]."""

    def __init__(self, config: GPTConfig, *args: Any, pg_collection: ProcessGroupCollection, **options: Any) -> None:
        undivided = copy.copy(config)
        undivided.context_parallel_size = 1  # upstream refuses more
        super().__init__(undivided, *args, pg_collection=pg_collection, **options)
        self.config = config
        self.context_group = pg_collection.cp

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
            keys, values = (self._whole(tensor, [len(query)])[0] for tensor in (key, value))
            rows = [tensor.permute(1, 2, 0, 3) for tensor in (query, keys, values)]  # [R, A or G, S, D]
            return self._attend(*rows).permute(2, 0, 1, 3).flatten(2)
        bounds, size = packed_seq_params.cu_seqlens_q.tolist(), self.context_group.size()
        lengths = [(end - begin) // size for begin, end in zip(bounds[:-1], bounds[1:], strict=True)]
        segments = zip(query.split(lengths), self._whole(key, lengths), self._whole(value, lengths), strict=True)
        attended = [self._attend(*(part.transpose(0, 1)[None] for part in parts))[0] for parts in segments]
        return torch.cat([part.transpose(0, 1) for part in attended]).flatten(1)

    def _whole(self, held: Tensor, lengths: list[int]) -> list[Tensor]:
        """Each sequence of `held` [T, ...], `lengths` tokens of it here, with the tokens of all ranks, in order."""
        size = self.context_group.size()
        if size == 1:
            return list(held.split(lengths))
        by_rank = gather_from_sequence_parallel_region(held, group=self.context_group).unflatten(0, (size, -1))
        whole = []
        for part in by_rank.split(lengths, dim=1):
            gathered = part.flatten(0, 1)
            order = torch.cat([held_positions(len(gathered), rank, size) for rank in range(size)])
            whole.append(gathered[order.argsort()])
        return whole

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`query` [R, A, held tokens, D] against `key` and `value` [R, G, all tokens, D]."""
        group, mask = self.context_group, None
        if group.size() > 1:
            positions = held_positions(key.shape[2], group.rank(), group.size())
            mask = positions[:, None] >= torch.arange(key.shape[2])
        dropout = self.config.attention_dropout if self.training else 0.0
        with get_cuda_rng_tracker().fork() if dropout else contextlib.nullcontext():  # heads differ from rank to rank
            return scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=mask is None,
                dropout_p=dropout,
                scale=self.softmax_scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
