"""The head's Triton kernels in Triton's interpreter, on a CPU: numbers against float64.

    TRITON_INTERPRET=1 python -m pytest --noconftest tests/ops/test_policy_head_kernels.py

What a compiler makes of them, and how fast they are, only a GPU shows.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are defined

from accelerator import act_as_accelerator
from plain_policy_head import linear_logprob

from nemo_flashrl.ops import (
    fused_linear_gated_policy_loss,
    fused_linear_logprob,
    fused_linear_policy_loss,
    kernels,
)
from nemo_flashrl.ops.softmax import ChunkStatistics

pytestmark = pytest.mark.skipif(
    not getattr(kernels, "INTERPRETED", False),
    reason="needs Triton, which a CPU build of torch comes without, and TRITON_INTERPRET=1 before it is imported",
)
SIZES = [(1, 7), (32, 101), (33, 509), (5, 4096), (40, 5003)]  # rows, columns
FIRST_ROW = 50  # of this rank's shard: some targets lie before it, some behind


COMPILE = """
import os
os.environ.pop("TRITON_INTERPRET")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from nemo_flashrl.ops import kernels

NUMBERS = dict.fromkeys(("first_row", "num_rows", "num_columns"), "i32")
TYPES = {"targets": "*i64", "scale": "fp32", "out": "*bf16"} | NUMBERS
for kernel in (kernels._statistics_kernel, kernels._gradient_kernel):
    for entropy in (False, True):
        constants = {"HAS_SCALES": entropy, "ENTROPY": entropy, "BLOCK": 2048}
        signature = {name: "constexpr" if name in constants else TYPES.get(name, "*fp32") for name in kernel.arg_names}
        source = ASTSource(kernel, signature, constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
        print(len(compiled.asm["cubin"]))
"""


def test_they_compile_for_hopper():
    """To machine code, by the compiler that comes with Triton; no GPU runs it."""
    result = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.split()) == 4


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    act_as_accelerator(monkeypatch)
    monkeypatch.setattr(kernels, "is_fused", lambda logits: logits.dtype == torch.float32)


def problem(size: tuple[int, int], peak: float = 20.0) -> dict[str, Tensor]:
    rows, columns = size
    generator = torch.Generator().manual_seed(columns)
    logits = torch.randn(rows, columns, generator=generator) * peak / 4
    logits[0, columns // 2] = peak
    targets = torch.randint(columns + 2 * FIRST_ROW, (rows,), generator=generator)
    targets[0] = columns // 2 + FIRST_ROW  # near certain where the peak is high
    derivative = torch.randn(rows, generator=generator)
    slope = torch.randn(rows, generator=generator)
    derivative[1::4] = slope[1::4] = 0
    return {
        **{"logits": logits, "targets": targets, "derivative": derivative, "slope": slope},
        "scales": 0.5 + torch.rand(rows, generator=generator),
    }


def scale_of(inputs: dict[str, Tensor], per_token: bool) -> float | Tensor:
    return inputs["scales"] if per_token else 1 / 0.7


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_statistics(size, entropy, per_token):
    for peak in (3.0, 80.0):
        inputs = problem(size, peak)
        scale = scale_of(inputs, per_token)
        inputs["logits"][-1, 0] = float("nan") if size[0] > 1 else 0.0
        packed = kernels.row_statistics(inputs["logits"], inputs["targets"], FIRST_ROW, scale, entropy=entropy).double()
        z = inputs["logits"].double() * (scale.double()[:, None] if per_token else scale)
        own = inputs["targets"] - FIRST_ROW
        owned = (own >= 0) & (own < size[1])
        known = slice(0, -1 if size[0] > 1 else None)
        distance = z - z.amax(1, keepdim=True)
        right = [
            z.amax(1),
            distance.exp().sum(1),
            torch.where(owned, z.gather(1, own.clamp(0, size[1] - 1)[:, None])[:, 0], 0),
        ]
        if entropy:
            right.append((distance.exp() * distance).sum(1))
        assert len(packed) == len(right)
        for actual, exact in zip(packed, right, strict=True):
            error = (actual - exact)[known].abs()
            assert (error <= peak * 2e-6 * exact[known].abs().clamp(min=1)).all()
        assert size[0] == 1 or packed[1, -1].isnan()


def exact_gradient(inputs: dict[str, Tensor], scale: float | Tensor, entropy: bool) -> tuple[Tensor, ChunkStatistics]:
    """By autograd in float64; the rank owns all of the vocabulary but what lies outside of [FIRST_ROW, ...)."""
    columns = inputs["logits"].shape[1]
    z = inputs["logits"].double().requires_grad_()
    scaled = z * (scale.double()[:, None] if isinstance(scale, Tensor) else scale)
    more = torch.zeros(len(z), 2 * FIRST_ROW, dtype=torch.float64)  # other ranks' logits
    everything = torch.cat([more[:, :FIRST_ROW], scaled, more[:, FIRST_ROW:]], 1)
    shares = torch.log_softmax(everything, 1)
    logprobs = shares.gather(1, inputs["targets"][:, None])[:, 0]
    entropies = -(shares.exp() * shares).sum(1)
    total = (inputs["derivative"].double() * logprobs).sum()
    if entropy:
        total = total + (inputs["slope"].double() * entropies).sum()
    (gradient,) = torch.autograd.grad(total, z)
    assert gradient.shape[1] == columns
    shift = everything.detach().amax(1)
    exp_sum = (everything.detach() - shift[:, None]).exp().sum(1)
    numbers = (logprobs.detach(), shift, exp_sum, shift, entropies.detach())
    return gradient, ChunkStatistics(*(values.float() for values in numbers))


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7), (torch.float16, 2**-11)])
def test_gradient(size, entropy, per_token, dtype, bound):
    # The interpreter cuts bf16 off where a GPU rounds to the nearest; fp16 reaches down to 2^-24.
    flushed = 2**-25 * size[1] ** 0.5 if dtype == torch.float16 else 0
    for peak in (3.0, 20.0):
        inputs = problem(size, peak)
        scale = scale_of(inputs, per_token)
        exact, statistics = exact_gradient(inputs, scale, entropy)
        dead = inputs["derivative"] == 0
        inputs["logits"][dead] = float("nan")
        slope = inputs["slope"] if entropy else None
        actual = kernels.logit_gradient_(
            inputs["logits"], dtype, inputs["targets"], FIRST_ROW, scale, statistics, inputs["derivative"], slope
        )
        assert actual.dtype == dtype and actual.is_contiguous() and not actual[dead].any()
        assert actual.data_ptr() == inputs["logits"].data_ptr()
        live = ~dead
        error = (actual.double() - exact)[live].norm(dim=1)
        assert (error <= bound * exact[live].norm(dim=1) + flushed).all()


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("way", ["logprob", "one pass", "gated"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2**-8)])
def test_the_head_through_them(way, entropy, dtype, bound):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator).to(dtype).requires_grad_() for n in (23, 300))
    targets = torch.randint(290, (23,), generator=generator)
    coefficient, slope = torch.randn(2, 23, generator=generator)
    coefficient[::3] = slope[::3] = 0
    main_grad = torch.zeros(300, 16)
    settings = {"vocab_size": 290, "chunk_tokens": 8, "temperature": 0.8, "grad_weight": main_grad}

    def loss(logprobs: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        return coefficient[tokens] * logprobs, coefficient[tokens]

    if way == "logprob":
        result = fused_linear_logprob(hidden, weight, targets, return_entropy=entropy, **settings)
        logprobs, entropies = result if entropy else (result, 0)
        total = (coefficient * logprobs + slope * entropies).sum()
    elif way == "one pass":
        bonus = slope if entropy else None
        total, logprobs = fused_linear_policy_loss(hidden, weight, targets, loss, entropy_weight=bonus, **settings)
    else:
        total, logprobs = fused_linear_gated_policy_loss(
            hidden,
            weight,
            targets,
            lambda logprobs, entropies: coefficient != 0,
            lambda logprobs, keep, tokens: loss(logprobs, tokens),
            entropy_weight=slope if entropy else None,
            **settings,
        )
    total.backward()
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    right, entropies = linear_logprob(*wide, targets, vocab_size=290, temperature=0.8)
    (coefficient * right + (slope * entropies if entropy else 0)).sum().backward()
    assert ((logprobs - right).abs() <= 2e-6 * right.abs().clamp(min=1)).all()
    for actual, exact in ((hidden.grad, wide[0].grad), (main_grad, wide[1].grad)):
        assert (actual.double() - exact).norm() <= bound * exact.norm()
