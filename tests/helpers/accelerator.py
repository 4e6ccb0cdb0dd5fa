"""The policy head's way on an accelerator, run on a CPU with real numbers, under the rules of CUDA's own kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nemo_flashrl.ops import kernels
from nemo_flashrl.ops.head import Head
from nemo_flashrl.ops.products import Products

HALF = (torch.float16, torch.bfloat16)
TORCHES = ("2.8", "2.9", "2.10")  # CI has the policy head's tests on each; 2.10 changed the rule for addmm's summand


def act_as_accelerator(monkeypatch: pytest.MonkeyPatch, torch_version: str = "2.8", *, apex: bool = False) -> None:
    """No look at a number, products of half-precision operands in fp32, and what they refuse in that torch."""
    monkeypatch.setattr(Head, "may_look", False)
    monkeypatch.setattr(Products, "has_wide_output", property(lambda self: not self.is_plain))
    monkeypatch.setattr(torch, "mm", _wide(torch.mm, torch_version))
    monkeypatch.setattr(torch, "addmm", _wide(torch.addmm, torch_version))
    monkeypatch.setattr(kernels, "wgrad_gemm_accum_fp32", _accumulate if apex else None)


def _wide(function, torch_version: str):
    def call(*tensors, out_dtype=None, out=None, **scalars):
        if out_dtype is None:
            return function(*tensors, out=out, **scalars)
        check_out_dtype(torch_version, tensors, out_dtype, None if out is None else out.dtype)
        return function(*(tensor.to(out_dtype) for tensor in tensors), out=out, **scalars)

    return call


def check_out_dtype(torch_version: str, tensors: tuple, out_dtype: torch.dtype, out: torch.dtype | None) -> None:
    """As `_mm_dtype_out_cuda` and `_addmm_dtype_out_cuda` do in aten/src/ATen/native/cuda/Blas.cpp."""
    *summand, left, right = tensors
    for own in summand:
        allowed = (right.dtype,) if torch_version in ("2.8", "2.9") else (right.dtype, out_dtype)
        if own.dtype not in allowed:
            raise RuntimeError(f"self and mat2 must have the same dtype, but got {own.dtype} and {right.dtype}")
    if left.dtype != right.dtype:
        raise RuntimeError(f"mat1 and mat2 must have the same dtype, but got {left.dtype} and {right.dtype}")
    if out not in (None, out_dtype):
        raise RuntimeError("out_dtype must be the same as the dtype of the provided out tensor")
    if out_dtype != left.dtype and not (out_dtype == torch.float32 and left.dtype in HALF):
        raise RuntimeError("out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs")


def _accumulate(rows: Tensor, gradient: Tensor, out: Tensor) -> None:
    """apex's kernel reads plain pointers: it sees neither strides nor dtypes."""
    assert rows.is_contiguous() and gradient.is_contiguous() and out.is_contiguous()
    assert rows.dtype == gradient.dtype and rows.dtype in HALF and out.dtype == torch.float32
    assert out.shape == (gradient.shape[1], rows.shape[1]) and rows.shape[0] == gradient.shape[0]
    out.addmm_(gradient.float().t(), rows.float())
