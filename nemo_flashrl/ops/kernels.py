"""The elementwise work of a chunk of logits where the host must not wait: a Triton kernel each, plain torch elsewhere.

Legend: C = rows, V = this rank's columns of the vocabulary, z = scale * logit, y = the target.

| | reads of a logit | writes |
| --- | --- | --- |
| `row_statistics` | 4 bytes | nothing |
| `logit_gradient_` | 4 bytes | an element of the weights' dtype: 2 bytes in half precision |

Both find the target's column themselves, so that nothing else touches `[C, V]`. Statistics are relative to the row's
maximum, found in the same read: no number of theirs decides what is launched next. The kernels are operators of torch,
so that whatever traces or counts operations sees one each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .softmax import LOWEST, ChunkStatistics, narrow_, row_blocks, target_logits

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch comes without it
    triton = None
try:  # apex, part of NVIDIA's images: (input, gradient, out): out += gradient^T @ input, in one fp32 sum
    from fused_weight_gradient_mlp_cuda import wgrad_gemm_accum_fp32
except ImportError:
    wgrad_gemm_accum_fp32 = None

HAS_TRITON = triton is not None

LIBRARY = torch.library.Library("nemo_flashrl", "DEF")
LIBRARY.define(
    "row_statistics(Tensor logits, Tensor targets, int first_row, float scale, Tensor? scales, bool entropy) -> Tensor"
)
LIBRARY.define(
    "logit_gradient(Tensor logits, Tensor(a!) out, Tensor targets, int first_row, float scale, Tensor? scales, "
    "Tensor logprobs, Tensor shift, Tensor exp_sum, Tensor derivative, Tensor? slope, Tensor? entropies) -> ()"
)


def is_fused(logits: Tensor) -> bool:
    return HAS_TRITON and logits.is_cuda and logits.dtype == torch.float32


def row_statistics(logits: Tensor, targets: Tensor, first_row: int, scale: float | Tensor, *, entropy: bool) -> Tensor:
    """Softmax statistics of `logits` `[C, V]`, which stay, packed `[3, C]`, or `[4, C]` with `entropy`: m, s, z_y, u.

    Their meaning is that of `softmax.local_statistics`. `targets` int64 `[C]` are vocabulary ids, of which this rank
    owns `[first_row, first_row + V)`; `scale` is one number or `[C]`.
    """
    if logits.shape[1] == 0:
        packed = logits.new_zeros(4 if entropy else 3, logits.shape[0])
        packed[0] = LOWEST
        return packed
    if is_fused(logits):
        return torch.ops.nemo_flashrl.row_statistics(logits, targets, first_row, *_both(scale), entropy)
    packed = logits.new_zeros(4 if entropy else 3, logits.shape[0])
    scales = _column(scale, packed[0])
    packed[2] = target_logits(logits, *_columns(targets, first_row, logits)) * scales
    for block, factor, maximum, exp_sum, weighted_sum in row_blocks(logits, scales, packed[0], packed[1], packed[-1]):
        shifted = block * factor
        torch.amax(shifted, 1, keepdim=True, out=maximum)
        exponentials = shifted.sub_(maximum).exp()
        torch.sum(exponentials, 1, keepdim=True, out=exp_sum)
        if entropy:
            torch.sum(shifted.mul_(exponentials), 1, keepdim=True, out=weighted_sum)
    return packed


def logit_gradient_(
    logits: Tensor,
    dtype: torch.dtype,
    targets: Tensor,
    first_row: int,
    scale: float | Tensor,
    statistics: ChunkStatistics,
    derivative: Tensor,
    slope: Tensor | None,
) -> Tensor:
    """`logits` `[C, V]` become dL/dlogit of `dtype`, from dL/dlogprob and dL/dentropy (`slope`), each `[C]`.

    The formula is that of `passes`. Where both are 0 the row is 0, whatever its logits are. The other arguments as in
    `row_statistics`.
    """
    numbers = (statistics.logprobs, statistics.shift, statistics.exp_sum, derivative, slope, statistics.entropies)

    def form(some: slice, out: Tensor) -> None:
        own_scale = scale[some] if isinstance(scale, Tensor) else scale
        own = tuple(None if values is None else values[some] for values in numbers)
        _form_gradient(logits[some], out, targets[some], first_row, own_scale, own)

    return narrow_(logits, dtype, form)


def _form_gradient(
    logits: Tensor, out: Tensor, targets: Tensor, first_row: int, scale: float | Tensor, numbers: tuple
) -> None:
    """`out` may be `logits`; otherwise they must not overlap."""
    if is_fused(logits):
        torch.ops.nemo_flashrl.logit_gradient(logits, out, targets, first_row, *_both(scale), *numbers)
        return
    logprobs, shift, exp_sum, derivative, slope, entropies = numbers
    live, scales = derivative != 0, _column(scale, derivative)
    factor = scales / exp_sum
    constant, weight, at_target = -derivative * factor, torch.zeros_like(factor), -derivative * torch.expm1(logprobs)
    if slope is not None:
        live = live | (slope != 0)
        constant, weight = constant - slope * factor * (entropies - exp_sum.log()), -slope * factor
        at_target = at_target - slope * logprobs.exp() * (logprobs + entropies)
    columns, owned = _columns(targets, first_row, logits)
    per_row = (scales, shift, constant, weight, at_target * scales, columns, owned, live)
    start = 0
    for block, number, amount, offset, factor, entry, column, own, is_live in row_blocks(logits, *per_row):
        distance = (block * number).sub_(amount)
        value = distance.exp()
        value.mul_(offset if slope is None else distance.mul_(factor).add_(offset))
        value.scatter_(1, column, torch.where(own, entry, value.gather(1, column)))
        stop = start + block.shape[0]
        out[start:stop] = value.masked_fill_(~is_live, 0)
        start = stop


def _both(scale: float | Tensor) -> tuple[float, Tensor | None]:
    return (1.0, scale) if isinstance(scale, Tensor) else (scale, None)


def _column(scale: float | Tensor, like: Tensor) -> Tensor:
    return scale if isinstance(scale, Tensor) else torch.full_like(like, scale)


def _columns(targets: Tensor, first_row: int, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Targets as columns of this rank, clamped into them, and whether they are among them."""
    columns = targets - first_row
    return columns.clamp(0, logits.shape[1] - 1), (columns >= 0) & (columns < logits.shape[1])


@torch.library.register_fake("nemo_flashrl::row_statistics", lib=LIBRARY)
def _(logits, targets, first_row, scale, scales, entropy):
    return logits.new_empty(4 if entropy else 3, logits.shape[0])


@torch.library.register_fake("nemo_flashrl::logit_gradient", lib=LIBRARY)
def _(logits, out, *numbers):
    return None


if HAS_TRITON:
    INTERPRETED = bool(getattr(getattr(triton, "knobs", None), "runtime", None) and triton.knobs.runtime.interpret)
    FEWEST_TUNED_ROWS = 256
    SIZES = [
        triton.Config({"BLOCK": block}, num_warps=warps)
        for block, warps in ((2048, 8), (1024, 4), (4096, 8), (4096, 16))
    ]

    def _tuned(kernel):
        """The fastest of a few block sizes for a vocabulary; an interpreter has nothing to measure."""
        return triton.autotune(SIZES[:1] if INTERPRETED else SIZES, key=["num_columns"])(kernel)

    @triton.jit
    def _statistics_kernel(
        logits,
        targets,
        scales,
        packed,
        scale,
        first_row,
        num_rows,
        num_columns,
        HAS_SCALES: tl.constexpr,
        ENTROPY: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """One row. Each lane keeps a maximum and sums of its own; they are put together at the end."""
        row = tl.program_id(0)
        own = logits + row.to(tl.int64) * num_columns
        factor = scale
        if HAS_SCALES:
            factor = tl.load(scales + row)
        lanes = tl.arange(0, BLOCK)
        maximum = tl.full([BLOCK], -1e30, tl.float32)
        exp_sum = tl.zeros([BLOCK], tl.float32)
        weighted = tl.zeros([BLOCK], tl.float32)
        for start in range(0, num_columns, BLOCK):
            there = start + lanes < num_columns
            z = tl.load(own + start + lanes, mask=there, other=0.0) * factor
            z = tl.where(there, z, -float("inf"))
            larger = tl.maximum(maximum, z)
            shrink = tl.exp(maximum - larger)
            exponential = tl.exp(z - larger)
            if ENTROPY:
                weighted = shrink * (weighted + exp_sum * (maximum - larger))
                weighted += tl.where(exponential > 0, exponential * (z - larger), 0.0)
            exp_sum = exp_sum * shrink + exponential
            maximum = larger
        top = tl.max(maximum, 0)
        shrink = tl.exp(maximum - top)
        tl.store(packed + row, top)
        tl.store(packed + num_rows + row, tl.sum(exp_sum * shrink, 0))
        column = tl.load(targets + row) - first_row
        owned = (column >= 0) & (column < num_columns)
        tl.store(packed + 2 * num_rows + row, tl.load(own + column, mask=owned, other=0.0) * factor)
        if ENTROPY:
            weighted = tl.where(exp_sum > 0, shrink * (weighted + exp_sum * (maximum - top)), 0.0)
            tl.store(packed + 3 * num_rows + row, tl.sum(weighted, 0))

    @triton.jit
    def _gradient_kernel(
        logits,
        out,
        targets,
        scales,
        logprobs,
        shifts,
        exp_sums,
        derivatives,
        slopes,
        entropies,
        scale,
        first_row,
        num_columns,
        HAS_SCALES: tl.constexpr,
        ENTROPY: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """BLOCK columns of one row."""
        row = tl.program_id(0)
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        there = columns < num_columns
        factor = scale
        if HAS_SCALES:
            factor = tl.load(scales + row)
        derivative = tl.load(derivatives + row)
        logprob = tl.load(logprobs + row)
        exp_sum = tl.load(exp_sums + row)
        # expm1: near 0 the exponential less 1 would lose the difference, which is all that counts of a sure token.
        x = logprob
        series = x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7 * (1 + x / 8)))))))
        constant = -derivative * factor / exp_sum
        at_target = -derivative * tl.where(x > -0.5, series, tl.exp(x) - 1)
        live = derivative != 0
        offset = row.to(tl.int64) * num_columns
        z = tl.load(logits + offset + columns, mask=there, other=0.0) * factor
        distance = z - tl.load(shifts + row)
        value = tl.exp(distance)
        if ENTROPY:
            slope = tl.load(slopes + row)
            entropy = tl.load(entropies + row)
            live = live | (slope != 0)
            weight = -slope * factor / exp_sum
            constant += weight * (entropy - tl.log(exp_sum))
            at_target -= slope * tl.exp(x) * (x + entropy)
            value = tl.where(value > 0, value * (constant + weight * distance), value)
        else:
            value = value * constant
        value = tl.where(columns == tl.load(targets + row) - first_row, at_target * factor, value)
        value = tl.where(live, value, 0.0)
        tl.store(out + offset + columns, value.to(out.dtype.element_ty), mask=there)

    _tuned_statistics, _tuned_gradient = _tuned(_statistics_kernel), _tuned(_gradient_kernel)

    @torch.library.impl(LIBRARY, "row_statistics", "CompositeExplicitAutograd")
    def _(logits, targets, first_row, scale, scales, entropy):
        num_rows, num_columns = logits.shape
        packed = logits.new_empty(4 if entropy else 3, num_rows)
        if num_rows:
            tensors = (logits, targets, targets if scales is None else scales, packed)
            options = {"HAS_SCALES": scales is not None, "ENTROPY": entropy}
            _tuned_statistics[(num_rows,)](*tensors, scale, first_row, num_rows, num_columns, **options)
        return packed

    @torch.library.impl(LIBRARY, "logit_gradient", "CompositeExplicitAutograd")
    def _(logits, out, targets, first_row, scale, scales, *numbers):
        num_rows, num_columns = logits.shape
        if num_rows == 0:
            return
        tensors = (targets if values is None else values for values in (scales, *numbers))  # what is not read is there
        arguments = (logits, out, targets, *tensors, scale, first_row, num_columns)
        options = {"HAS_SCALES": scales is not None, "ENTROPY": numbers[-2] is not None}

        def grid(meta: dict) -> tuple[int, int]:
            return num_rows, triton.cdiv(num_columns, meta["BLOCK"])

        # Tuning runs it more than once: its input must stay, and its rows be more than the few narrowing begins with.
        if out.data_ptr() == logits.data_ptr() or num_rows < FEWEST_TUNED_ROWS:
            _gradient_kernel[grid](*arguments, **options, BLOCK=2048, num_warps=8)
        else:
            _tuned_gradient[grid](*arguments, **options)
