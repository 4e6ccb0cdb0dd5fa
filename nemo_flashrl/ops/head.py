"""What every pass over the output layer needs to know: the shard, the vocabulary, the temperature, the chunks.

Legend: T = tokens, H = hidden size, V = rows of the vocabulary with padding, TP = tensor-parallel size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .chunks import Chunk, plan_chunks, to_host
from .memory import picked_chunk_tokens
from .products import Products
from .tensor_parallel import shard_of


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """The settings all entry points share; see `fused_linear_logprob` for their meaning."""

    tp_group: dist.ProcessGroup | None = None
    vocab_size: int | None = None
    temperature: float | Tensor = 1.0
    chunk_tokens: int | None = None
    sequence_parallel: bool = False
    reduce_hidden_gradient: bool = True


@dataclass(frozen=True, slots=True)
class Head:
    """One rank's output layer, checked, with the tensors of one call."""

    hidden: Tensor  # [T, H], or [T / TP, H] under sequence parallelism
    products: Products  # holds this rank's rows of the true vocabulary, [V', H]
    targets: Tensor  # int64 [T]
    mask: Tensor | None  # bool [T], on the host
    group: dist.ProcessGroup | None  # None where there is one rank
    first_row: int  # vocabulary id of the shard's first row
    num_shards: int  # of the hidden states
    shard: int
    temperature: float | Tensor  # [T] where tokens were sampled at different ones
    chunk_tokens: int
    reduce_hidden_gradient: bool

    @property
    def sequence_parallel(self) -> bool:
        return self.num_shards > 1

    @property
    def may_look(self) -> bool:
        """Whether the host reads numbers without waiting for a device."""
        return self.products.weight.device.type == "cpu"

    @property
    def num_columns(self) -> int:
        return self.products.weight.shape[0]

    def chunks(self, selected: Tensor | None) -> list[Chunk]:
        """Of all tokens, or of the `selected` ones, bool `[T]` on the host."""
        tokens, device = self.targets.numel(), self.hidden.device
        return plan_chunks(tokens, self.chunk_tokens, selected, self.num_shards, self.shard, device)

    def empty_logits(self, num_rows: int) -> Tensor:
        return torch.empty(num_rows, self.num_columns, dtype=self.products.dtype, device=self.hidden.device)

    def per_token(self, fill: float = 0) -> Tensor:
        return torch.full((self.targets.numel(),), fill, dtype=self.products.dtype, device=self.hidden.device)

    def scale(self, chunk: Chunk) -> float | Tensor:
        """What the chunk's logits are multiplied with: one number, or `[C]`."""
        if isinstance(self.temperature, Tensor):
            return chunk.take(1 / self.temperature, 1).to(self.products.dtype)
        return 1 / self.temperature

    def columns(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Targets as columns of this shard, int64, clamped into it, and whether they are in it."""
        columns = targets - self.first_row
        owned = (columns >= 0) & (columns < self.num_columns)
        return columns.clamp(0, max(0, self.num_columns - 1)), owned


def make_head(hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor | None, options: HeadOptions) -> Head:
    """Check what a user handed in and lay it out; ValueError names the field, the value and the remedy."""
    _, size = shard_of(options.tp_group)
    _check_tensors(hidden, weight, targets, mask, size if options.sequence_parallel else 1)
    num_rows = weight.shape[0]
    _check_numbers(options, targets.numel())
    if not 1 <= _vocab_size(weight, options) <= num_rows * size:
        raise ValueError(
            f"vocab_size={options.vocab_size}, but {size} shard(s) of {num_rows} rows hold {num_rows * size} rows: "
            "give the true vocabulary size, between 1 and the rows of all shards"
        )
    on_host = _check_values(targets, mask, options.temperature, _vocab_size(weight, options))
    return lay_out(hidden, weight, targets, on_host, options)


def lay_out(hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor | None, options: HeadOptions) -> Head:
    """What was checked before; `mask` on the host."""
    rank, size = shard_of(options.tp_group)
    num_rows, num_shards = weight.shape[0], size if options.sequence_parallel else 1
    own_rows = min(max(_vocab_size(weight, options) - rank * num_rows, 0), num_rows)
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    products = Products(weight.detach()[:own_rows], dtype)
    chunk_tokens = options.chunk_tokens or picked_chunk_tokens(num_rows, on_gpu=weight.device.type != "cpu")
    return Head(
        hidden=hidden.detach().contiguous(),
        products=products,
        targets=targets,
        mask=mask,
        group=options.tp_group if size > 1 else None,
        first_row=rank * num_rows,
        num_shards=num_shards,
        shard=rank if options.sequence_parallel else 0,
        temperature=options.temperature,
        chunk_tokens=chunk_tokens,
        reduce_hidden_gradient=options.reduce_hidden_gradient,
    )


def _check_tensors(hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor | None, num_shards: int) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or weight.shape[0] == 0:
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)} and weight {tuple(weight.shape)}: give [T, H] and [V, H] with the "
            "same H; flatten [S, B, H] to [S * B, H]"
        )
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise ValueError(f"hidden is {hidden.dtype} and weight {weight.dtype}: give both the same floating dtype")
    if hidden.device != weight.device or hidden.device != targets.device:
        raise ValueError(
            f"hidden is on {hidden.device}, weight on {weight.device}, targets on {targets.device}: "
            "put them on one device"
        )
    if targets.dim() != 1 or targets.dtype != torch.int64 or targets.numel() != hidden.shape[0] * num_shards:
        raise ValueError(
            f"targets has shape {tuple(targets.shape)} and dtype {targets.dtype}: give int64 of "
            f"{hidden.shape[0] * num_shards} ids, one for each row of hidden over {num_shards} shard(s)"
        )
    if mask is not None and (mask.shape != targets.shape or mask.dtype != torch.bool):
        raise ValueError(f"mask has shape {tuple(mask.shape)} and dtype {mask.dtype}: give bool [{targets.numel()}]")


def _vocab_size(weight: Tensor, options: HeadOptions) -> int:
    size = shard_of(options.tp_group)[1]
    return weight.shape[0] * size if options.vocab_size is None else options.vocab_size


def _check_numbers(options: HeadOptions, num_tokens: int) -> None:
    own = options.temperature
    if isinstance(own, Tensor):
        if own.shape != (num_tokens,) or not own.is_floating_point():
            raise _wrong_temperature(own, num_tokens)
    elif not (math.isfinite(own) and own > 0):
        raise ValueError(f"temperature={own}: give a finite number above 0; 1 leaves the logits alone")
    if options.chunk_tokens is not None and options.chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={options.chunk_tokens}: give at least 1, or None to have it picked")


def _wrong_temperature(own: Tensor, num_tokens: int) -> ValueError:
    return ValueError(
        f"temperature has shape {tuple(own.shape)} and dtype {own.dtype}: give {num_tokens} finite numbers "
        "above 0, one a token, or one for all"
    )


def _check_values(targets: Tensor, mask: Tensor | None, temperature: float | Tensor, vocab_size: int) -> Tensor | None:
    """Look at what is on the device once: refuse what is wrong there, and return the mask on the host."""
    wrong = (targets < 0) | (targets >= vocab_size)
    if mask is not None:
        wrong &= mask
    refused = [wrong.any()]
    if isinstance(temperature, Tensor):
        refused.append(~(temperature.isfinite() & (temperature > 0)).all())
    num_refused = len(refused)
    seen = to_host(torch.cat([torch.stack(refused), *([] if mask is None else [mask])]))
    if bool(seen[0]):
        place = int(to_host(wrong.nonzero()[0]))
        raise ValueError(
            f"targets[{place}]={int(to_host(targets[place]))} is outside the vocabulary of {vocab_size}: give ids in "
            f"[0, {vocab_size}), and leave other rows out with mask="
        )
    if bool(seen[1:num_refused].any()):
        raise _wrong_temperature(temperature, targets.numel())
    return None if mask is None else seen[num_refused:]
