"""The policy head on a GPU: precision in bf16, and what it takes of the device's memory."""

from __future__ import annotations

import pytest
import torch

from nemo_flashrl.ops import fused_linear_policy_loss

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is here")

T, H, V, CHUNK = 4096, 1024, 32_000, 512


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(T, H, device="cuda", generator=generator)
    weight = torch.randn(V, H, device="cuda", generator=generator) / H**0.5
    targets = torch.randint(V, (T,), device="cuda", generator=generator)
    coefficient = torch.randn(T, device="cuda", generator=generator) / T
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets, coefficient


def naive(hidden, weight, targets, coefficient) -> torch.Tensor:
    logprobs = torch.log_softmax((hidden @ weight.T).float(), -1).gather(-1, targets[:, None])[:, 0]
    return (coefficient * logprobs).sum()


def fused(hidden, weight, targets, coefficient) -> torch.Tensor:
    def loss(logprobs, tokens):
        return coefficient[tokens] * logprobs, coefficient[tokens]

    return fused_linear_policy_loss(hidden, weight, targets, loss, chunk_tokens=CHUNK)[0]


def gradients(function, dtype: torch.dtype) -> list[torch.Tensor]:
    hidden, weight, *rest = inputs(torch.bfloat16)
    hidden, weight = (t.detach().to(dtype).requires_grad_() for t in (hidden, weight))
    function(hidden, weight, *rest).backward()
    return [hidden.grad.double(), weight.grad.double()]


def test_bf16_is_no_further_from_float64_than_the_naive_path() -> None:
    exact = gradients(naive, torch.float64)
    for truth, plain, ours in zip(
        exact, gradients(naive, torch.bfloat16), gradients(fused, torch.bfloat16), strict=True
    ):
        assert (ours - truth).norm() <= 1.05 * (plain - truth).norm()


def test_peak_memory_is_two_gradients_and_a_chunk() -> None:
    hidden, weight, targets, coefficient = inputs(torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fused(hidden, weight, targets, coefficient).backward()
    extra = torch.cuda.max_memory_allocated() - before
    staged = V * H * (4 + 2) + T * H * (4 + 2)  # fp32 sums and what autograd is handed, bf16
    assert extra <= staged + 3 * CHUNK * V * 4 + 2**24
