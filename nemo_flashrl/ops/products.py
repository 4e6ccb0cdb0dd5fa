"""The three matrix products of a chunk, summed in fp32 (fp64 for fp64 weights) whatever the weights are.

Legend: C = rows of a chunk, H = hidden size, V = this rank's rows of the true vocabulary.

Where the weights already are fp32 or fp64, each is one BLAS call into a given buffer. bf16 and fp16 differ by the
hardware: an accelerator multiplies half-precision operands and writes fp32 (`out_dtype`, torch 2.8 on); a CPU has no
such product and gains nothing from half operands, so blocks of vocabulary rows are widened on the way through.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Vocabulary rows widened at a time on a CPU: large enough for full BLAS speed, small enough to cost nothing (2 MiB at
# H=512).
WIDENED_ROWS = 1024


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
        """out = scale * rows @ weight^T; `[C, H]` of the weight's dtype -> `[C, V]` of `dtype`; scale may be `[C]`."""
        if isinstance(scale, Tensor):  # on the rows it would be rounded to their dtype
            self.logits(rows, 1.0, out)
            out.mul_(scale[:, None])
        elif self.is_plain:
            torch.addmm(out, rows, self.weight.t(), beta=0, alpha=scale, out=out)
        elif self.has_wide_output:
            torch.addmm(out, rows, self.weight.t(), out_dtype=self.dtype, beta=0, alpha=scale, out=out)
        else:
            rows = rows.to(self.dtype)
            for start, block in self._widened_blocks():
                part = out[:, start : start + block.shape[0]]
                torch.addmm(part, rows, block.t(), beta=0, alpha=scale, out=part)

    def operand(self, matrix: Tensor) -> Tensor:
        """`matrix` `[C, V]` of `dtype` as the next two products want it: itself, or narrowed within its own storage."""
        return narrow_(matrix, self.weight.dtype) if self.has_wide_output else matrix

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

    def add_weight_gradient(self, operand: Tensor, rows: Tensor, factor: Tensor, out: Tensor) -> None:
        """out += operand^T @ (factor * rows); `[C, V]`, `[C, H]`, `[C]` -> `[V, H]` of `dtype`."""
        if not self.has_wide_output:
            out.addmm_(operand.t(), rows * factor[:, None])  # the factor is fp32, and so is the product
            return
        # fp16 reaches down to 6e-8 only: coefficients of a mean over a million tokens would vanish before the product.
        size = float(factor.abs().amax()) if self.weight.dtype == torch.float16 else 1.0
        scaled = torch.mul(rows, (factor / size)[:, None], out=torch.empty_like(rows))
        torch.addmm(out, operand.t(), scaled, out_dtype=self.dtype, alpha=size, out=out)

    def _widened_blocks(self):
        for start in range(0, self.weight.shape[0], WIDENED_ROWS):
            yield start, self.weight[start : start + WIDENED_ROWS].to(self.dtype)


def narrow_(matrix: Tensor, dtype: torch.dtype, block_bytes: int = 2**25) -> Tensor:
    """Convert a contiguous `[C, V]` to a narrower dtype inside its own storage; the wide values are gone afterwards.

    Row blocks go in order: a block is read before anything is written over it, and what is written ends before the
    first row that is still to be read.
    """
    num_rows, width = matrix.shape
    narrow = matrix.view(-1).view(dtype)[: num_rows * width].view(num_rows, width)
    step = max(1, block_bytes // max(1, width * matrix.element_size()))
    for start in range(0, num_rows, step):
        narrow[start : start + step] = matrix[start : start + step].to(dtype)
    return narrow
