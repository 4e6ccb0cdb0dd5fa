"""What algorithms share: refusals of impossible input, and sums over the tokens of a trajectory.

Legend as in `algorithm.py`. Tokens are left out by a value that counts nothing, not by a mask as an index: the host
would wait for the GPU to learn how many there are.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_flashrl.algorithms.algorithm import TokenBatch

# A probability of 1 computed as logit - logsumexp comes out above 0 by the rounding of the logits: 8e-6 at 100.
LOGPROB_TOLERANCE = 1e-5
EXTREME_NATS = 20.0  # trainer and sampler this far apart on a token that was sampled: a fault, not a policy change
LARGEST_RATIO = torch.finfo(torch.float32).max
_SHOWN = 5  # offenders that an error message lists


def check_number(name: str, value: float, lowest: float, highest: float) -> None:
    """Refuse a setting that is not a number in [lowest, highest], with a ValueError that names it."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not lowest <= value <= highest:
        raise ValueError(f"{name} = {value!r}: must be a number from {lowest} to {highest}")


def working_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if one of them is float64, else float32: what losses are computed in."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def check_batch(rewards: Tensor, action_counts: Tensor) -> None:
    """Refuse an empty batch, a non-finite reward [B], or a trajectory without action tokens [B]."""
    if rewards.numel() == 0:
        raise ValueError("a batch needs at least one trajectory, got none")
    if not torch.isfinite(rewards).all():
        rows = _first(~torch.isfinite(rewards))
        raise ValueError(f"rewards must be finite; trajectories {rows} have {rewards[rows].tolist()}")
    if not (action_counts > 0).all():
        raise ValueError(f"trajectories {_first(action_counts <= 0)} have no action token: drop them before training")


def check_finite(name: str, values: Tensor, batch: TokenBatch) -> None:
    """Refuse a value [N] that is not finite on an action token."""
    bad = batch.action_mask & ~torch.isfinite(values)
    if bad.any():
        raise ValueError(f"{name} must be finite on action tokens; {_offenders(bad, values, batch.row)}")


def check_logprobs(batch: TokenBatch, **logprobs: Tensor) -> None:
    """Refuse a log-prob [N] that is above 0, by more than rounding, or not finite on an action token.

    All that are given are looked at together, as the host waits for a look.
    """
    bad = {
        name: batch.action_mask & ~(torch.isfinite(values) & (values <= LOGPROB_TOLERANCE))
        for name, values in logprobs.items()
    }
    if torch.stack(list(bad.values())).any():
        name = next(name for name in bad if bad[name].any())
        raise ValueError(
            f"{name} must be finite and at most 0 on action tokens; {_offenders(bad[name], logprobs[name], batch.row)}"
        )


def check_ratios(name: str, difference: Tensor, used: Tensor, row: Tensor) -> None:
    """Refuse exp(difference) [N], called `name`, that overflows float32 on a token where it is `used` (bool [N])."""
    bad = used & (difference > math.log(LARGEST_RATIO))
    if bad.any():
        raise ValueError(f"{name} overflows float32; logarithms: {_offenders(bad, difference, row)}")


def on_action_tokens(values: Tensor, batch: TokenBatch) -> Tensor:
    """`values` [N] in float64, 0 where nothing was sampled, whatever is there."""
    return torch.where(batch.action_mask, values, 0).double()


def row_sum(values: Tensor, row: Tensor, rows: int) -> Tensor:
    """Sum `values` [N] over the tokens of each row, float64 [rows].

    float64 because index_add on a GPU adds in any order: rounded back to float32, the result is the same every run.
    """
    return torch.zeros(rows, dtype=torch.float64, device=row.device).index_add_(0, row, values.double())


def trajectory_sums(batch: TokenBatch, *values: Tensor) -> Tensor:
    """Each of `values` [N] summed over all tokens of each trajectory: float64 [len(values), R], equal on all ranks."""
    sums = torch.stack([row_sum(value, batch.row, len(batch.advantages)) for value in values])
    if batch.context is not None:
        dist.all_reduce(sums, group=batch.context.group)
    return sums


def counted_once(batch: TokenBatch, value: Tensor) -> Tensor:
    """A sum over rows as a statistic: every rank of a context group knows it, the first one reports it."""
    first = batch.context is None or dist.get_rank(batch.context.group) == 0
    return scalar(value) if first else torch.zeros_like(scalar(value))


def places_in_trajectory(batch: TokenBatch, values: Tensor) -> Tensor:
    """int64 [N]: the place of each action token in its trajectory by descending `values` [N]; of equals the earlier.

    What was not sampled has places of its own, as if of one more trajectory.
    """
    row = torch.where(batch.action_mask, batch.row, len(batch.advantages))
    parts, own, position = [torch.stack([values.double(), row.double()])], 0, None
    if batch.context is not None:
        group = batch.context.group
        mine = torch.cat([parts[0], batch.context.position.double()[None]])
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, mine, group=group)
        own, position = dist.get_rank(group), torch.cat([part[2] for part in parts])
    scores, rows, *_ = torch.cat(parts, 1)
    rows = rows.long()
    # Stable sorts: by position, by value, by row. Without a group, tokens are in the order of their positions already.
    order = torch.arange(len(rows), device=row.device) if position is None else position.argsort(stable=True)
    order = order[torch.sort(scores[order], descending=True, stable=True).indices]
    order = order[torch.sort(rows[order], stable=True).indices]
    counts = rows.new_zeros(len(batch.advantages) + 1).index_add_(0, rows, torch.ones_like(rows))
    starts = counts.cumsum(0) - counts
    places = torch.empty_like(rows)
    places[order] = torch.arange(len(rows), device=row.device) - starts[rows[order]]
    return places.view(len(parts), -1)[own]


def mismatch_stats(difference: Tensor, batch: TokenBatch) -> dict[str, Tensor]:
    """How far trainer and sampler disagree, from their log-prob differences [N], 0 elsewhere: sums, and `*_max`."""
    distance = difference.abs()
    return {
        "policy_tokens": scalar(batch.action_mask.sum()),
        "logprob_difference": scalar(distance.sum()),
        "logprob_difference_max": largest(distance),
        "extreme_tokens": scalar((distance > EXTREME_NATS).sum()),
    }


def scalar(value: Tensor) -> Tensor:
    """A statistic as `Gate.stats` wants it: a detached float32 scalar."""
    return value.detach().to(torch.float32)


def largest(values: Tensor) -> Tensor:
    """The maximum of non-negative `values`, 0 where there are none."""
    return scalar(values.max() if values.numel() else values.new_zeros(()))


def _first(bad: Tensor) -> list[int]:
    return bad.nonzero().flatten()[:_SHOWN].tolist()


def _offenders(bad: Tensor, values: Tensor, row: Tensor) -> str:
    tokens = _first(bad)
    return f"rows {row[tokens].tolist()} have {values[tokens].tolist()}"
