"""The three matrix products of a chunk, summed in fp32 (fp64 for fp64 weights) whatever the weights are.

Legend: C = rows of a chunk, H = hidden size, V = this rank's rows of the true vocabulary.

Where the weights already are fp32 or fp64, each is one BLAS call into a given buffer. bf16 and fp16 differ by the
hardware: an accelerator multiplies half-precision operands and writes fp32 (`out_dtype`, torch 2.8 on); a CPU has no
such product and gains nothing from half operands, so blocks of vocabulary rows are widened on the way through.

`torch.mm` alone takes `out_dtype` alike in every torch: `addmm` wants its summand in half precision up to 2.9. So the
sum over chunks is apex's kernel, or a block of the product and an addition.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import kernels

# Vocabulary rows widened at a time on a CPU: large enough for full BLAS speed, small enough to cost nothing (2 MiB at
# H=512).
WIDENED_ROWS = 1024

# Of a product on an accelerator that is yet to be added to the sum.
SUMMAND_BYTES = 2**25


@dataclass(frozen=True, slots=True)
class Products:
    """The products against one weight shard `[V, H]`; sums are of `dtype`."""

    weight: Tensor
    dtype: torch.dtype

    @property
    def is_plain(self) -> bool:
        return self.weight.dtype == self.dtype

    @property
    def has_wide_output(self) -> bool:
        """Half-precision operands, fp32 result, in one call."""
        return not self.is_plain and self.weight.device.type != "cpu"

    def logits(self, rows: Tensor, scale: float | Tensor, out: Tensor) -> None:
        """out = scale * rows @ weight^T; `[C, H]` of the weight's dtype -> `[C, V]` of `dtype`; scale may be `[C]`.

        Half-precision operands take no scale but 1: it is left to whatever reads the logits.
        """
        if self.has_wide_output:
            assert not isinstance(scale, Tensor) and scale == 1
            torch.mm(rows, self.weight.t(), out_dtype=self.dtype, out=out)
        elif isinstance(scale, Tensor):  # on the rows it would be rounded to their dtype
            self.logits(rows, 1.0, out)
            out.mul_(scale[:, None])
        elif self.is_plain:
            torch.addmm(out, rows, self.weight.t(), beta=0, alpha=scale, out=out)
        else:
            rows = rows.to(self.dtype)
            for start, block in self._widened_blocks():
                part = out[:, start : start + block.shape[0]]
                torch.addmm(part, rows, block.t(), beta=0, alpha=scale, out=part)

    def hidden_gradient(self, operand: Tensor, out: Tensor) -> None:
        """out = operand @ weight; `[C, V]` -> `[C, H]` of `dtype`."""
        if self.is_plain:
            torch.mm(operand, self.weight, out=out)
        elif self.has_wide_output:
            torch.mm(operand, self.weight, out_dtype=self.dtype, out=out)
        else:
            out.zero_()
            for start, block in self._widened_blocks():
                out.addmm_(operand[:, start : start + block.shape[0]], block)

    def add_weight_gradient(self, operand: Tensor, rows: Tensor, out: Tensor, size: Tensor | None = None) -> None:
        """out += operand^T @ rows; `[C, V]`, `[C, H]` -> `[V, H]` of `dtype`. Half-precision operands may be in units
        of `size`, a scalar."""
        if not self.has_wide_output:
            out.addmm_(operand.t(), rows)
        elif kernels.wgrad_gemm_accum_fp32 is not None and size is None:
            kernels.wgrad_gemm_accum_fp32(rows, operand, out)
        else:
            step = max(1, SUMMAND_BYTES // (out.shape[1] * out.element_size()))
            summand = torch.empty_like(out[:step])
            for part, columns in zip(out.split(step), operand.split(step, 1), strict=True):
                product = torch.mm(columns.t(), rows, out_dtype=self.dtype, out=summand[: part.shape[0]])
                part.add_(product if size is None else product.mul_(size))

    def _widened_blocks(self):
        for start in range(0, self.weight.shape[0], WIDENED_ROWS):
            yield start, self.weight[start : start + WIDENED_ROWS].to(self.dtype)
