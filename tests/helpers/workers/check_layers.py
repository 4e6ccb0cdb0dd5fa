"""Transformer Engine's layers on a device: attention packed and padded, experts multiplied together and one by one."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from gpu_device import Device, head_answers, join_world
from megatron.core import parallel_state
from megatron.core.transformer.moe import token_dispatcher

from nemo_flashrl.algorithms.flash_reinforce import FlashReinforce
from nemo_flashrl.models import HeadSettings, PolicyModel
from nemo_flashrl.models.families import nemo_config
from nemo_flashrl.models.scoring import disagreement
from workers import gpu_step

VOCABULARY, EXPERTS, CHOSEN = 32_000, 8, 2


def main(part: str, layers: int, hidden: int, lengths: Sequence[int]) -> dict:
    with Device(head_answers(sum(lengths))) as device:
        join_world()
        parallel_state.initialize_model_parallel(1, 1)
        if not device.is_real:
            gpu_step.without_values()
            rows = sum(lengths) * CHOSEN
            token_dispatcher.maybe_move_tensor_to_cpu = functools.partial(gpu_step.evenly, rows, rows)
        return PARTS[part](device, layers, hidden, list(lengths))


def model_of(layers: int, hidden: int, positions: int, family: str, *, together: bool = True) -> PolicyModel:
    """As a run makes it on a GPU, in bf16, with Megatron's first weights."""
    sizes = {
        **{"model_type": family, "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers},
        **{"num_attention_heads": hidden // 128, "num_key_value_heads": max(1, hidden // 512), "rms_norm_eps": 1e-5},
        **{"vocab_size": VOCABULARY, "max_position_embeddings": positions, "tie_word_embeddings": False},
        **({"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN} if family == "mixtral" else {}),
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(sizes))
        config = nemo_config(folder, context_length=positions, dtype=torch.bfloat16)
    config.gradient_accumulation_fusion = False  # there is no main_grad here
    config.moe_grouped_gemm = family == "mixtral" and together
    model = PolicyModel(config, FlashReinforce(), HeadSettings(VOCABULARY))
    model.configure_model()
    model.module.cuda()  # some of NeMo's families are made on the host
    return model


def batches(lengths: list[int]) -> tuple[dict, dict, torch.Tensor]:
    """The same trajectories packed into one row and padded, and where the packed tokens are among the padded."""
    longest, generator = max(lengths), np.random.default_rng(1)
    tokens, targets = generator.integers(VOCABULARY, size=(2, len(lengths), longest))
    positions = np.broadcast_to(np.arange(longest), tokens.shape)
    places = np.flatnonzero(positions < np.array(lengths)[:, None])
    padded = {"tokens": tokens, "position_ids": positions, "targets": targets}
    packed = {name: values.reshape(-1)[places][None] for name, values in padded.items()}
    packed |= {"cu_seqlens": np.cumsum([0, *lengths], dtype=np.int32), "max_seqlen": np.int32(longest)}
    return on_device(packed), on_device(padded), torch.from_numpy(places).cuda()


def on_device(batch: dict) -> dict:
    """All but the longest length, which the host reads."""
    return {
        name: torch.tensor(value) if name == "max_seqlen" else torch.from_numpy(value.copy()).cuda()
        for name, value in batch.items()
    }


def attention(device: Device, layers: int, hidden: int, lengths: list[int]) -> dict:
    """Log-probs of packed rows against padded ones, and of the pass in training against the one without a gradient.

    Distances are in what `models.scoring` allows between two passes: 1 is the bound. Without the bounds of its
    trajectories the packed row is further away than that.
    """
    model = model_of(layers, hidden, sum(lengths), "llama")
    packed, padded, places = batches(lengths)
    with torch.no_grad():
        model.eval()
        one = model.score_step(packed).flatten()
        other = model.score_step(padded).flatten()[places]
        whole = {"cu_seqlens": packed["cu_seqlens"][[0, -1]], "max_seqlen": torch.tensor(sum(lengths))}
        blurred = model.score_step(packed | whole).flatten()
    model.train()
    trained = model.score_step(packed).detach().flatten()
    with torch.no_grad():
        milliseconds = {
            name: device.milliseconds(lambda batch=batch: model.score_step(batch), 5)
            for name, batch in (("packed", packed), ("padded", padded))
        }
    return {
        "layer": type(model.module.decoder.layers[0].self_attention.core_attention).__name__,
        "packed_against_padded": apart(device, one, other, layers),
        "as_one_trajectory": apart(device, blurred, other, layers),
        "training_against_no_grad": apart(device, trained, one, layers),
        "forward_ms": milliseconds,
    }


def experts(device: Device, layers: int, hidden: int, lengths: list[int]) -> dict:
    """Log-probs of experts multiplied together against the same weights expert by expert, and a step's time of each."""
    models = {name: model_of(layers, hidden, max(lengths), "mixtral", together=name == "together") for name in WAYS}
    source = dict(models["together"].module.named_parameters())
    with torch.no_grad():
        for name, parameter in models["one by one"].module.named_parameters():
            of_all = re.sub(r"local_experts\.(\d+)\.(linear_fc\d)\.weight", r"\2.weight\1", name)
            parameter.copy_(source[of_all])
    packed, _, _ = batches(lengths)
    found: dict = {"classes": {}, "step_ms": {}}
    logprobs = []
    for name, model in models.items():
        found["classes"][name] = type(model.module.decoder.layers[0].mlp.experts).__name__
        with torch.no_grad():
            logprobs.append(model.score_step(packed).flatten())

        def step(model: PolicyModel = model) -> None:
            model.zero_grad()
            (-model.score_step(packed).sum()).backward()

        found.setdefault("peak_bytes", {})[name] = device.peak_of(step)
        found["step_ms"][name] = device.milliseconds(step, 3)
    found["together_against_one_by_one"] = apart(device, *logprobs, layers)
    return found


def apart(device: Device, one: torch.Tensor, other: torch.Tensor, layers: int) -> float:
    both = torch.stack([one, other]).double().cpu()
    return disagreement(both, torch.bfloat16, layers)[0] if device.is_real else 0.0


WAYS = ("together", "one by one")
PARTS = {"attention": attention, "experts": experts}
