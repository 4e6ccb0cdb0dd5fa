"""The policy head on the hidden states of a trained model: distributions are as peaked as real ones are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from plain_policy_head import linear_policy_loss
from real_models import MESSAGES
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_flashrl.ops import fused_linear_gated_policy_loss, fused_linear_policy_loss

CHUNK = 24


@pytest.fixture(scope="module")
def inputs(smollm2: Path) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [T, H] and weight [V, H] in float64, targets int64 [T], of a conversation."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).requires_grad_(False)
    tokens = tokenizer.apply_chat_template(MESSAGES, return_tensors="pt")
    hidden = model.model(tokens[:, :-1]).last_hidden_state[0]
    return hidden.double(), model.lm_head.weight.double(), tokens[0, 1:]


def loss(logprobs: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
    """(-1)^t sqrt(1 + t) times each log-prob, so that a coefficient at the wrong token shows."""
    place = torch.arange(tokens.start, tokens.stop, dtype=logprobs.dtype)
    derivative = (1 - 2 * (place % 2)) * (1 + place).sqrt()
    return derivative * logprobs, derivative


@pytest.mark.parametrize(
    ("temperature", "dtype", "gated"),
    [(1.0, torch.float64, False), (0.5, torch.float64, True), (1.0, torch.float32, True), (0.5, torch.float32, False)],
)
def test_loss_and_gradient_are_those_of_full_logits_in_float64(inputs, temperature, dtype, gated) -> None:
    """In float32 the error is rounding: that of logits of this size, 2^-24 each, in every sum over H = 576."""
    hidden, weight, targets = inputs
    right = gradients(linear_policy_loss, hidden, weight, targets, loss, temperature=temperature)
    given = hidden.to(dtype), weight.to(dtype), targets
    settings = {"temperature": temperature, "chunk_tokens": CHUNK}
    if gated:
        keep = lambda logprobs, entropies: torch.ones(len(targets), dtype=torch.bool)  # noqa: E731
        kept = lambda logprobs, keep, tokens: loss(logprobs, tokens)  # noqa: E731
        found = gradients(fused_linear_gated_policy_loss, *given, keep, kept, **settings)
    else:
        found = gradients(fused_linear_policy_loss, *given, loss, **settings)
    assert right[1].min() < -5 and right[1].max() > -1e-2  # unlikely tokens, and certain ones
    bound = 1e-13 if dtype == torch.float64 else 1e-5
    assert float((found[1].double() - right[1]).abs().max()) <= bound * 30 / temperature
    assert abs(float(found[0]) - float(right[0])) <= bound * float(right[1].abs().sum())
    for name, own, expected in (("hidden", found[2], right[2]), ("weight", found[3], right[3])):
        assert float((own.double() - expected).norm() / expected.norm()) <= bound, name


def gradients(function, hidden: Tensor, weight: Tensor, *arguments, **settings) -> tuple[Tensor, ...]:
    """(loss, log-probs, gradient of hidden, gradient of weight)."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    total, logprobs = function(hidden, weight, *arguments, **settings)
    total.backward()
    return total.detach(), logprobs.detach(), hidden.grad, weight.grad
