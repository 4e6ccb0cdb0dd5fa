"""Whether two checkpoints, Hugging Face or NeMo folders, are one model: configuration, tensors, logits."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_flashrl.convert.convert import alone, build, hf_files_of
from nemo_flashrl.convert.nemo_folder import WEIGHTS, is_nemo_folder, read_config, read_weights, weights_dtype
from nemo_flashrl.models.families import portable_config, read_hf_config
from nemo_flashrl.weight_sync.hf_reader import HfTensors
from nemo_flashrl.weights.shards import stream_hf_tensors

SHOWN = 5  # differences of a kind that are spelt out
LOGITS_TOLERANCE = 1e-5  # of the largest logit, in fp32
TOKENS = 64


class Side:
    """One of the two: a Hugging Face folder is computed by transformers, a NeMo folder by Megatron."""

    def __init__(self, folder: Path, temporary: Path) -> None:
        self.is_nemo = is_nemo_folder(folder)
        if not self.is_nemo:
            self.folder, self.tensors = folder, HfTensors(folder)
            self.config = read_hf_config(folder)
            return
        self.folder = hf_files_of(folder, temporary)
        self.config = read_hf_config(self.folder)
        assert read_config(folder).num_layers == self.config["num_hidden_layers"]
        self.model = build(portable_config(self.folder), weights_dtype(folder / WEIGHTS))
        read_weights(self.model, folder / WEIGHTS)
        self.tensors = {
            name: tensor.clone() for name, tensor in stream_hf_tensors(self.model, self.config["vocab_size"])
        }

    def names(self) -> set[str]:
        return set(self.tensors if self.is_nemo else self.tensors.names())

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """float32 [1, S, V]."""
        if self.is_nemo:
            positions = torch.arange(tokens.shape[1])[None]
            return self.model.float()(tokens, positions, None)[..., : self.config["vocab_size"]]
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(**self.config)
        model = AutoModelForCausalLM.from_pretrained(self.folder, config=config, torch_dtype=torch.float32)
        return model.eval()(tokens).logits


def differences(first: str | Path, second: str | Path) -> list[str]:
    """What differs between two folders, one line each; an empty list says that they are one model.

    Raises:
        ValueError: one of them cannot be read.
    """
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other, alone():
        a, b = Side(Path(first), Path(one)), Side(Path(second), Path(other))
        found = [*_config(a.config, b.config), *_tensors(a, b)]
        return found or list(_logits(a, b))


def _config(a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    for name in sorted(a.keys() | b.keys()):
        if name != "transformers_version" and a.get(name) != b.get(name):
            yield f"config.json: {name} is {a.get(name)!r} and {b.get(name)!r}"


def _tensors(a: Side, b: Side) -> Iterator[str]:
    for side, other in ((a, b), (b, a)):
        missing = sorted(side.names() - other.names())
        for name in missing[:SHOWN]:
            yield f"{name}: not in the {'second' if other is b else 'first'}"
        if missing[SHOWN:]:
            yield f"and {len(missing) - SHOWN} more that are not there"
    shown = 0
    for name in sorted(a.names() & b.names()):
        line = _difference(name, a.tensors[name], b.tensors[name])
        shown += line is not None
        if line is not None and shown <= SHOWN:
            yield line
    if shown > SHOWN:
        yield f"and {shown - SHOWN} more tensors that differ"


def _difference(name: str, a: Tensor, b: Tensor) -> str | None:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{name}: {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
    if torch.equal(a, b):
        return None
    place = (a != b).nonzero()[0].tolist()
    largest, count = (a.float() - b.float()).abs().max(), int((a != b).sum())
    return (
        f"{name}: {count} of {a.numel()} elements differ, by at most {largest:.3g}; the first, {place}, is "
        f"{a[tuple(place)]:.9g} and {b[tuple(place)]:.9g}"
    )


def _logits(a: Side, b: Side) -> Iterator[str]:
    vocab_size = a.config["vocab_size"]
    tokens = torch.randint(0, vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    tokens = tokens[:, : a.config.get("max_position_embeddings", TOKENS)]
    one, other = a.logits(tokens), b.logits(tokens)
    difference = float((one - other).abs().max() / one.abs().max())
    if not difference <= LOGITS_TOLERANCE:
        position = int((one - other).abs().amax(-1).argmax())
        yield f"logits of equal tensors differ by {difference:.3g} of the largest, most at position {position}"
