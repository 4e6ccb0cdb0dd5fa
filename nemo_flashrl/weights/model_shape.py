"""A Hugging Face configuration -> the sizes of the Megatron model that it becomes, counted parameter by parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_flashrl.weight_sync.hf_config import SIZES, is_size


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with RMSNorm, rotary positions, grouped queries and a gated MLP, or a mixture of such MLPs."""

    layers: int
    hidden: int
    ffn: int  # of one expert, where there are experts
    heads: int
    groups: int  # key/value heads
    head_size: int
    vocab: int  # rows that count, without padding
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    experts: int = 0  # 0: one dense MLP
    experts_per_token: int = 1
    positions: int | None = None  # max_position_embeddings, beyond which no run trains

    @property
    def query(self) -> int:
        return self.heads * self.head_size

    @property
    def key(self) -> int:
        """Also the value's width."""
        return self.groups * self.head_size

    def padded_vocab(self, divisible_by: int, tensor: int) -> int:
        """Rows of the embedding: the next multiple that every tensor rank can take an equal share of."""
        multiple = divisible_by * tensor
        return -(-self.vocab // multiple) * multiple

    def layer_parameters(self, tensor: int = 1) -> int:
        """Of one layer on one tensor rank, its experts apart; norms and a router are on every rank whole."""
        qkv = (self.query + 2 * self.key) // tensor
        attention = qkv * self.hidden + self.query // tensor * self.hidden
        attention += (qkv if self.qkv_bias else 0) + (2 * self.head_size if self.qk_norm else 0)
        mlp = self.experts * self.hidden if self.experts else 3 * self.ffn // tensor * self.hidden  # a router, or dense
        return attention + mlp + 2 * self.hidden

    def stage_parameters(self, stage: int, stages: int, tensor: int, divisible_by: int = 128) -> int:
        """Of one tensor rank of a pipeline stage, experts apart; a tied model's last stage copies the embedding."""
        matrix = self.padded_vocab(divisible_by, tensor) // tensor * self.hidden
        first, last = stage == 0, stage == stages - 1
        count = self.layers // stages * self.layer_parameters(tensor)
        count += matrix * first
        count += (0 if self.tied and first else matrix) * last + self.hidden * last
        return count

    def expert_parameters(self, stages: int = 1, tensor: int = 1, expert: int = 1) -> int:
        """Of the experts of a stage on one rank: cut over tensor ranks, or some of them, each whole."""
        cut = tensor if expert == 1 else expert
        return self.layers // stages * self.experts * 3 * self.ffn * self.hidden // cut

    def adapter_parameters(self, targets: Sequence[str], rank: int, stages: int = 1, tensor: int = 1) -> int:
        """Of the two factors that LoRA puts beside each target of a stage, on one tensor rank."""
        widths = {  # of input and output together
            "linear_qkv": self.hidden + self.query + 2 * self.key,
            "linear_proj": self.query + self.hidden,
            "linear_fc1": self.hidden + 2 * self.ffn,
            "linear_fc2": self.ffn + self.hidden,
        }
        return self.layers // stages * sum(widths[target] for target in targets) * rank // tensor

    @property
    def parameters(self) -> int:
        """Of the whole model as published: no padding, nothing twice."""
        matrices = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer_parameters() + self.expert_parameters() + matrices + self.hidden

    @property
    def active_matrix_parameters(self) -> int:
        """Weights that a token is multiplied with in the trunk."""
        attention = (self.query + 2 * self.key) * self.hidden + self.query * self.hidden
        mlp = 3 * self.ffn * self.hidden * (self.experts_per_token if self.experts else 1)
        return self.layers * (attention + mlp + self.experts * self.hidden)


FAMILIES = ("llama", "mixtral", "qwen2", "qwen3", "qwen3_moe")
EXPERTS = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts"}


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """Read a `config.json` of one of `FAMILIES`.

    Raises:
        ValueError: a family that is not known, or a size that is missing or no whole number.
    """
    for name in SIZES:
        if not is_size(config.get(name)):
            raise ValueError(f"the model's config.json: {name}={config[name]!r} must be a whole number")
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}")
    try:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        return ModelShape(
            layers=config["num_hidden_layers"],
            hidden=hidden,
            ffn=config["moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"],
            heads=heads,
            groups=config.get("num_key_value_heads") or heads,
            head_size=config.get("head_dim") or hidden // heads,
            vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2",
            qk_norm=family in ("qwen3", "qwen3_moe"),
            experts=config[EXPERTS[family]] if family in EXPERTS else 0,
            experts_per_token=config.get("num_experts_per_tok", 1),
            positions=config.get("max_position_embeddings"),
        )
    except KeyError as error:
        raise ValueError(f"the model's config.json has no {error}") from error
