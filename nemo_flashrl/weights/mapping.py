"""Megatron parameter <-> Hugging Face tensors: one rule per parameter, read in both directions.

A rule sees the tensor-parallel shards of one parameter, in rank order, and answers with whole Hugging Face tensors;
backwards it cuts one rank's shard out of them. Names cover Megatron's local layers and Transformer Engine's, which
fuse a norm into the linear layer behind it and keep a rank's experts in one grouped layer.

Legend: H = hidden size, V = vocabulary, F = feed-forward size, g = key/value groups, r = query heads per group,
d = head size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RuleSizes:
    """The sizes that a rule needs."""

    vocab_size: int  # the tokenizer's, without padding rows
    query_groups: int
    heads_per_group: int
    head_dim: int
    tied: bool
    experts: str = ""  # whose names the experts have, a key of EXPERTS; "" without any
    num_experts: int = 0  # of a layer, over all ranks

    @classmethod
    def of(cls, config, vocab_size: int) -> RuleSizes:
        """From a Megatron TransformerConfig."""
        groups = config.num_query_groups or config.num_attention_heads
        return cls(
            vocab_size=vocab_size,
            query_groups=groups,
            heads_per_group=config.num_attention_heads // groups,
            head_dim=config.kv_channels,
            tied=config.share_embeddings_and_output_weights,
            experts=_experts_of(config) if config.num_moe_experts else "",
            num_experts=config.num_moe_experts or 0,
        )


def _experts_of(config) -> str:
    for base in type(config).__mro__:
        if base.__name__ in EXPERTS:
            return base.__name__
    raise ValueError(f"no names of experts for a {type(config).__name__} (nemo_flashrl/weights/mapping.py)")


@dataclass(frozen=True)
class Place:
    """Where a shard lies: tensor rank, tensor size (of experts' own), and the parameter's shape there."""

    rank: int
    size: int
    shape: torch.Size


ToHf = Callable[[Sequence[Tensor], RuleSizes], tuple[Tensor, ...]]
FromHf = Callable[[Sequence[Tensor], RuleSizes, "Place"], Tensor]


@dataclass(frozen=True)
class Rule:
    """`hf` holds the Hugging Face names that one Megatron parameter is made of; `{layer}` and `{expert}` are global
    numbers, the pattern's `expert` is the rank's own, and `{experts}` and the like are filled from EXPERTS."""

    pattern: re.Pattern[str]
    hf: tuple[str, ...]
    to_hf: ToHf
    from_hf: FromHf
    sharded: bool  # False: every tensor rank holds the same

    def hf_names(self, name: str, layer: int, layout: RuleSizes, first_expert: int = 0) -> list[str]:
        """The Hugging Face names that Megatron parameter `name` of global layer `layer` is made of.

        `first_expert` is the global number of the first expert of the rank that holds the parameter.
        """
        expert = first_expert + int(self.pattern.match(name).groupdict().get("expert", 0))
        names = EXPERTS.get(layout.experts, {})
        return [hf.format(layer=layer, expert=expert, **names) for hf in self.hf]

    @property
    def of_expert(self) -> bool:
        """Experts are spread over groups of ranks of their own."""
        return "expert" in self.pattern.groupindex


def _whole_to_hf(shards: Sequence[Tensor], layout: RuleSizes) -> tuple[Tensor, ...]:
    return (shards[0],)


def _whole_from_hf(tensors: Sequence[Tensor], layout: RuleSizes, place: Place) -> Tensor:
    return tensors[0]


def _rows_to_hf(shards: Sequence[Tensor], layout: RuleSizes) -> tuple[Tensor, ...]:
    """Input-dimension shards of a row-parallel layer: [out, in/TP] -> [out, in]."""
    return (torch.cat(tuple(shards), dim=1),)


def _rows_from_hf(tensors: Sequence[Tensor], layout: RuleSizes, place: Place) -> Tensor:
    return tensors[0].chunk(place.size, dim=1)[place.rank]


def _vocab_to_hf(shards: Sequence[Tensor], layout: RuleSizes) -> tuple[Tensor, ...]:
    """[Vpadded/TP, H] -> [V, H]: the padding rows go."""
    return (torch.cat(tuple(shards))[: layout.vocab_size],)


def _vocab_from_hf(tensors: Sequence[Tensor], layout: RuleSizes, place: Place) -> Tensor:
    """[V, H] -> this rank's rows, filled up to the parameter's own with zeros."""
    if tensors[0].shape[0] != layout.vocab_size:
        raise ValueError(
            f"a vocabulary of {layout.vocab_size} tokens, but {tensors[0].shape[0]} rows in the checkpoint"
        )
    held = place.shape[0]
    rows = tensors[0][place.rank * held : (place.rank + 1) * held]
    return torch.nn.functional.pad(rows, (0, 0, 0, held - rows.shape[0]))


def _gate_up_to_hf(shards: Sequence[Tensor], layout: RuleSizes) -> tuple[Tensor, ...]:
    """Each shard is [gate_i; up_i]: de-interleaved, not just concatenated."""
    halves = [shard.chunk(2) for shard in shards]
    return torch.cat([gate for gate, _ in halves]), torch.cat([up for _, up in halves])


def _gate_up_from_hf(tensors: Sequence[Tensor], layout: RuleSizes, place: Place) -> Tensor:
    return torch.cat([tensor.chunk(place.size)[place.rank] for tensor in tensors])


def _qkv_to_hf(shards: Sequence[Tensor], layout: RuleSizes) -> tuple[Tensor, ...]:
    """[g * (r + 2) * d, ...] grouped as (queries, key, value) per group -> q, k, v."""
    whole = torch.cat(tuple(shards))
    trailing = whole.shape[1:]
    r, d = layout.heads_per_group, layout.head_dim
    grouped = whole.view(layout.query_groups, r + 2, d, *trailing)
    return tuple(part.reshape(-1, *trailing) for part in (grouped[:, :r], grouped[:, r : r + 1], grouped[:, r + 1 :]))


def _qkv_from_hf(tensors: Sequence[Tensor], layout: RuleSizes, place: Place) -> Tensor:
    q, k, v = tensors
    trailing = q.shape[1:]
    g, d = layout.query_groups, layout.head_dim
    grouped = torch.cat([part.view(g, -1, d, *trailing) for part in (q, k, v)], dim=1)
    return grouped.chunk(place.size)[place.rank].reshape(-1, *trailing)


def _rule(pattern: str, hf: Sequence[str], kind: str) -> Rule:
    to_hf, from_hf = {
        "whole": (_whole_to_hf, _whole_from_hf),
        "rows": (_rows_to_hf, _rows_from_hf),
        "vocab": (_vocab_to_hf, _vocab_from_hf),
        "gate_up": (_gate_up_to_hf, _gate_up_from_hf),
        "qkv": (_qkv_to_hf, _qkv_from_hf),
    }[kind]
    return Rule(re.compile(pattern + r"\Z"), tuple(hf), to_hf, from_hf, sharded=kind != "whole")


_LAYER = r"decoder\.layers\.\d+\."
_HF = "model.layers.{layer}."
# Megatron's local layers hold experts one by one, Transformer Engine's as weight0, weight1, ... of one layer.
_ONE = _LAYER + r"mlp\.experts\.local_experts\.(?P<expert>\d+)\."
_GROUPED = _LAYER + r"mlp\.experts\."
_EXPERT = _HF + "{moe}.experts.{expert}."
# NeMo's configuration class of a family with experts -> what Hugging Face calls their parts
EXPERTS = {
    "MixtralConfig": {"moe": "block_sparse_moe", "gate": "w1.weight", "up": "w3.weight", "down": "w2.weight"},
    "Qwen3MoEConfig": {
        "moe": "mlp",
        "gate": "gate_proj.weight",
        "up": "up_proj.weight",
        "down": "down_proj.weight",
    },
}

RULES = (
    _rule(r"embedding\.word_embeddings\.weight", ["model.embed_tokens.weight"], "vocab"),
    _rule(r"output_layer\.weight", ["lm_head.weight"], "vocab"),
    _rule(r"decoder\.final_layernorm\.weight", ["model.norm.weight"], "whole"),
    _rule(
        _LAYER + r"(input_layernorm\.weight|self_attention\.linear_qkv\.layer_norm_weight)",
        [_HF + "input_layernorm.weight"],
        "whole",
    ),
    _rule(
        _LAYER + r"(pre_mlp_layernorm\.weight|mlp\.linear_fc1\.layer_norm_weight)",
        [_HF + "post_attention_layernorm.weight"],
        "whole",
    ),
    _rule(_LAYER + r"self_attention\.q_layernorm\.weight", [_HF + "self_attn.q_norm.weight"], "whole"),
    _rule(_LAYER + r"self_attention\.k_layernorm\.weight", [_HF + "self_attn.k_norm.weight"], "whole"),
    _rule(_LAYER + r"self_attention\.linear_qkv\.weight", [_HF + f"self_attn.{p}_proj.weight" for p in "qkv"], "qkv"),
    _rule(_LAYER + r"self_attention\.linear_qkv\.bias", [_HF + f"self_attn.{p}_proj.bias" for p in "qkv"], "qkv"),
    _rule(_LAYER + r"self_attention\.linear_proj\.weight", [_HF + "self_attn.o_proj.weight"], "rows"),
    _rule(_LAYER + r"mlp\.linear_fc1\.weight", [_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"], "gate_up"),
    _rule(_LAYER + r"mlp\.router\.weight", [_HF + "{moe}.gate.weight"], "whole"),
    _rule(_ONE + r"linear_fc1\.weight", [_EXPERT + "{gate}", _EXPERT + "{up}"], "gate_up"),
    _rule(_ONE + r"linear_fc2\.weight", [_EXPERT + "{down}"], "rows"),
    _rule(_GROUPED + r"linear_fc1\.weight(?P<expert>\d+)", [_EXPERT + "{gate}", _EXPERT + "{up}"], "gate_up"),
    _rule(_GROUPED + r"linear_fc2\.weight(?P<expert>\d+)", [_EXPERT + "{down}"], "rows"),
    _rule(_LAYER + r"mlp\.linear_fc2\.weight", [_HF + "mlp.down_proj.weight"], "rows"),
)


def find_rule(name: str) -> Rule:
    """The rule of a Megatron parameter; none is a ValueError that names the parameter, never a skipped tensor."""
    for rule in RULES:
        if rule.pattern.match(name):
            return rule
    raise ValueError(
        f"no rule maps Megatron parameter {name!r} to Hugging Face names (nemo_flashrl/weights/mapping.py)"
    )
