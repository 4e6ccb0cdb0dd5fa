"""The policy head on a GPU: precision in bf16, and what it takes of the device's memory."""

from __future__ import annotations

import warnings

import pytest
import torch

from nemo_flashrl.ops import fused_linear_gated_policy_loss, fused_linear_policy_loss, kernels
from nemo_flashrl.ops.softmax import ChunkStatistics

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


@pytest.mark.skipif(not kernels.HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("columns", [16032, 5003])
def test_triton_kernels_are_plain_torch(monkeypatch, columns: int, entropy: bool) -> None:
    rows = 1000  # enough to be tuned
    generator = torch.Generator("cuda").manual_seed(0)
    logits = 5 * torch.randn(rows, columns, device="cuda", generator=generator)
    targets = torch.randint(2 * columns, (rows,), device="cuda", generator=generator)
    derivative, slope = torch.randn(2, rows, device="cuda", generator=generator)
    scale = 0.5 + torch.rand(rows, device="cuda", generator=generator)

    def both(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        packed = kernels.row_statistics(logits, targets, columns // 2, scale, entropy=True)
        shift, exp_sum, target, weighted = packed
        logprobs, entropies = target - shift - exp_sum.log(), exp_sum.log() - weighted / exp_sum
        statistics = ChunkStatistics(logprobs.clamp(max=0), shift, exp_sum, shift, entropies)
        own = slope if entropy else None
        return packed, kernels.logit_gradient_(
            logits.clone(), dtype, targets, columns // 2, scale, statistics, derivative, own
        )

    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2**-8)):
        fused_packed, fused_gradient = both(dtype)
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "is_fused", lambda logits: False)
            packed, gradient = both(dtype)
        torch.testing.assert_close(fused_packed, packed, rtol=1e-5, atol=1e-5)
        assert (fused_gradient - gradient).float().norm() <= bound * gradient.float().norm()


def test_the_host_waits_three_times_behind_a_gate() -> None:
    hidden, weight, targets, coefficient = inputs(torch.bfloat16)
    keep = coefficient > 0

    def call() -> None:
        loss, _ = fused_linear_gated_policy_loss(
            hidden,
            weight,
            targets,
            lambda logprobs, entropies: keep,
            lambda logprobs, kept, at: (
                torch.where(kept[at], coefficient[at], 0) * logprobs,
                coefficient[at] * kept[at],
            ),
            chunk_tokens=CHUNK,
            mask=torch.ones_like(keep),
        )
        loss.backward()

    call()  # kernels are tuned, and that waits
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([wait for wait in waits if "synchronizing" in str(wait.message)]) <= 3
