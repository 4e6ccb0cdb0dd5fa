"""The tensors that a Hugging Face checkpoint has by its config.json, and whether those of a folder are these.

Headers of files alone are read. Names are those of weights/mapping.py, sizes those of weights/model_shape.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_flashrl.weight_sync.hf_reader import HfTensors
from nemo_flashrl.weights.mapping import EXPERTS
from nemo_flashrl.weights.model_shape import ModelShape, model_shape

EXPERTS_OF = {"mixtral": EXPERTS["MixtralConfig"], "qwen3_moe": EXPERTS["Qwen3MoEConfig"]}


def check_tensors(source: HfTensors, hf_config: Mapping[str, Any]) -> None:
    """ValueError names a tensor that is missing, of another shape than config.json gives it, or of no such model."""
    wanted = hf_shapes(hf_config)
    for name, shape in wanted.items():
        if name not in source.names():
            raise ValueError(
                f"{source.folder} holds no tensor {name!r}: the checkpoint is incomplete or of another family"
            )
        if source.shape(name) != shape:
            raise ValueError(
                f"{name} of {source.folder} is {source.shape(name)}, and by its config.json {shape}: copy both again"
            )
    known = {*wanted, "lm_head.weight"}  # some write the tied head too
    left = sorted(name for name in source.names() - known if not name.endswith("rotary_emb.inv_freq"))
    if left:
        raise ValueError(
            f"{source.folder} holds {left[0]!r}{f' and {len(left) - 1} more' if left[1:] else ''}, "
            "which no parameter of the model takes: its config.json is of another model"
        )


def hf_shapes(hf_config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor; ValueError for a family or a size that is not there."""
    model = model_shape(hf_config)
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocab, model.hidden)}
    layer = {**_attention(model), **_mlp(model, hf_config["model_type"])}
    for number in range(model.layers):
        found |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    found["model.norm.weight"] = (model.hidden,)
    if not model.tied:
        found["lm_head.weight"] = (model.vocab, model.hidden)
    return found


def _attention(model: ModelShape) -> dict[str, tuple[int, ...]]:
    """Of one layer, its norms with it."""
    rows = {"q": model.query, "k": model.key, "v": model.key}
    found: dict[str, tuple[int, ...]] = {f"self_attn.{p}_proj.weight": (rows[p], model.hidden) for p in rows}
    if model.qkv_bias:
        found |= {f"self_attn.{p}_proj.bias": (rows[p],) for p in rows}
    if model.qk_norm:
        found |= {f"self_attn.{p}_norm.weight": (model.head_size,) for p in "qk"}
    found["self_attn.o_proj.weight"] = (model.hidden, model.query)
    return found | {f"{norm}_layernorm.weight": (model.hidden,) for norm in ("input", "post_attention")}


def _mlp(model: ModelShape, family: str) -> dict[str, tuple[int, ...]]:
    """Of one layer, all its experts and their router."""
    shapes = {"gate": (model.ffn, model.hidden), "up": (model.ffn, model.hidden), "down": (model.hidden, model.ffn)}
    if not model.experts:
        return {f"mlp.{part}_proj.weight": shape for part, shape in shapes.items()}
    names = EXPERTS_OF[family]
    found: dict[str, tuple[int, ...]] = {f"{names['moe']}.gate.weight": (model.experts, model.hidden)}
    for expert in range(model.experts):
        found |= {f"{names['moe']}.experts.{expert}.{names[part]}": shape for part, shape in shapes.items()}
    return found
