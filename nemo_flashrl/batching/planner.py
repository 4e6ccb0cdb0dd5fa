"""Trajectory lengths -> the microbatches of every data-parallel rank, under a token budget.

    lengths -> cut, drop or refuse what is too long -> arrange (arrangement.py) -> order -> Plan

Shapes: B = trajectories of one optimizer step, D = data-parallel ranks, M = microbatches of each rank.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from nemo_flashrl.batching.arrangement import arrange_packed, arrange_padded
from nemo_flashrl.batching.balancing import SegmentSizes, TokenCost

LAYOUTS = ("packed", "padded")
ON_TOO_LONG = ("error", "truncate", "drop")
TOO_LONG = "longer_than_context"  # the reason under which cuts and drops are counted
_SHOWN = 5  # offenders that an error message lists

logger = logging.getLogger(__name__)


def usable_context(context_length: int, context_margin: float) -> int:
    """Tokens that a trajectory may have: the limit to give to generation."""
    # Rounded first: 100 * (1 - 0.43) is 56.99999999999999 in some orders of evaluation, and 57 is meant.
    return math.floor(round(context_length * (1 - context_margin), 6))


def token_cost(num_parameters: float, num_layers: int, attention_width: int) -> TokenCost:
    """The cost of a trajectory of S tokens, in FLOPs of a forward pass: linear * S + quadratic * S^2.

    A token passes each weight once (2 FLOPs); causal attention multiplies half of an S x S matrix by `attention_width`
    columns twice (queries with keys, weights with values). Backward and recomputation scale both alike, and only the
    ratio matters.

    Args:
        num_parameters: weights that a token is multiplied by: without the input embedding; of experts, the active ones.
        num_layers: layers with attention.
        attention_width: heads * head dimension.

    Example: Llama 3 8B has 7.5e9 weights beside its input embedding, 32 layers and 32 heads of 128, so that
    quadratic / linear = 2 * 32 * 4096 / (2 * 7.5e9) = 1.75e-5: at 57k tokens attention costs as much as all else.
    """
    return TokenCost(2.0 * num_parameters, 2.0 * num_layers * attention_width)


@dataclass(frozen=True, slots=True)
class BatchingSettings:
    """How trajectories become microbatches.

    Args:
        max_tokens_per_microbatch: the budget. Packed: tokens of all trajectories, each rounded up to `multiple`.
            Padded: rows times the longest row, rounded up. A trajectory above it gets a microbatch of its own.
        context_length: tokens that the model can take.
        layout: "packed" (one row, attention kept inside each trajectory) or "padded" (a row each).
        multiple: what lengths are rounded up to: `context_parallel.length_multiple` of the parallel sizes.
        context_margin: share of the context kept free, as a guard against lengths that vary from rollout to rollout.
            A trajectory may have `usable_context` = floor(context_length * (1 - context_margin)) tokens.
        on_too_long: what happens to a longer one: "error" refuses the batch, "truncate" keeps the first
            `usable_context` tokens, "drop" leaves it out. The last two are counted and logged.
        linear_cost, quadratic_cost: a trajectory of S tokens takes a time in proportion to linear * S + quadratic *
            S^2; only their ratio matters. The default is that of an 8B model with 32 layers; see `token_cost`.
        max_padding_share: padded layout: padding / tokens run that a plan may reach to have fewer microbatches. Where
            the rounding to `multiple` takes more than half of it, grouping may still add half.

    Raises:
        ValueError: a value is out of its range; the message names the field, the value and what to set.
    """

    max_tokens_per_microbatch: int
    context_length: int
    layout: str = "packed"
    multiple: int = 1
    context_margin: float = 0.1
    on_too_long: str = "error"
    linear_cost: float = 1.0
    quadratic_cost: float = 1.75e-5
    max_padding_share: float = 0.05

    def __post_init__(self) -> None:
        for name in ("max_tokens_per_microbatch", "context_length", "multiple"):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} = {value!r}: set a whole number of at least 1")
        for name in ("context_margin", "max_padding_share"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value < 1:
                raise ValueError(f"{name} = {value!r}: set a share from 0 to below 1, such as 0.1 for a tenth")
        for name in ("linear_cost", "quadratic_cost"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value < math.inf:
                raise ValueError(
                    f"{name} = {value!r}: set a finite number that is not negative; token_cost() gives both"
                )
        if self.linear_cost == self.quadratic_cost == 0:
            raise ValueError("linear_cost = quadratic_cost = 0: set one of them above 0, or nothing can be balanced")
        for name, choices in (("layout", LAYOUTS), ("on_too_long", ON_TOO_LONG)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} = {getattr(self, name)!r}: set one of {', '.join(choices)}")
        if self.max_tokens_per_microbatch < self.multiple:
            raise ValueError(
                f"max_tokens_per_microbatch = {self.max_tokens_per_microbatch} is below multiple = {self.multiple}, to "
                "which every trajectory is padded: set a larger budget"
            )
        if self.usable_context < 1:
            raise ValueError(
                f"context_margin = {self.context_margin}: leaves no token of {self.context_length}; set less"
            )

    @property
    def usable_context(self) -> int:
        """As the function of this name."""
        return usable_context(self.context_length, self.context_margin)


@dataclass(frozen=True, slots=True)
class Plan:
    """The microbatches of one optimizer step.

    `ranks[d][m]` holds places in the list of lengths that was planned. Every rank has the same number of microbatches;
    one without trajectories is run as a padding row of weight 0, so that its rank joins every collective.
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]  # [D][M] of a few of 0..B-1
    lengths: tuple[int, ...]  # [B], tokens kept of each trajectory's longest segment: a shorter one stays whole; what
    # is cut keeps fewer than it has, what is dropped 0
    num_microbatches: int  # M, of each rank
    lower_bound: int  # no plan under these settings has a smaller M
    padding_share: float  # padding / tokens run
    budget_use: float  # tokens that count against the budget / (D * M * budget)
    cost_imbalance: float  # the costliest rank / the mean - 1: the share of time that the others wait
    microbatch_imbalance: float  # the costliest microbatch / the mean - 1: what stages of a pipeline wait for
    over_budget: int  # trajectories longer than the budget, alone in their microbatch
    truncated: dict[str, int] = field(default_factory=dict)  # reason -> trajectories cut
    dropped: dict[str, int] = field(default_factory=dict)  # reason -> trajectories left out

    def metrics(self) -> dict[str, float]:
        """What a run logs of a plan, flat."""
        numbers = {
            "padding_share": self.padding_share,
            "budget_use": self.budget_use,
            "cost_imbalance": self.cost_imbalance,
            "microbatch_imbalance": self.microbatch_imbalance,
            "microbatches": float(self.num_microbatches),
            "over_budget": float(self.over_budget),
        }
        for kind, counts in (("truncated", self.truncated), ("dropped", self.dropped)):
            numbers |= {f"{kind}_{reason}": float(count) for reason, count in counts.items()}
        return numbers


class LengthBatcher:
    """Plans the microbatches of one optimizer step; pure: the same arguments give the same plan on every rank.

    Example, in the packed layout with a budget of 1000 and two ranks:

        >>> batcher = LengthBatcher(BatchingSettings(max_tokens_per_microbatch=1000, context_length=2000))
        >>> plan = batcher.plan([900, 900, 100, 100], dp_size=2)
        >>> sorted(sorted(plan.lengths[i] for i in microbatches[0]) for microbatches in plan.ranks)
        [[100, 900], [100, 900]]
    """

    def __init__(self, settings: BatchingSettings) -> None:
        self.settings = settings

    def plan(self, lengths: Sequence[int | Sequence[int]], dp_size: int, seed: int = 0) -> Plan:
        """Spreads trajectories over ranks and microbatches.

        Args:
            lengths: [B] tokens of each trajectory, or of each of its segments, at least 1. Segments of a trajectory
                stay in one microbatch; in the padded layout, which gives each a row, they have it to themselves.
                What is cut or dropped must be so before anything is counted over the batch: advantages, action tokens.
            dp_size: data-parallel ranks, D.
            seed: which of equally long trajectories goes where, which rank gets which share, and the order of the
                microbatches. The figures of a plan depend neither on it nor on the order of the lengths.

        Raises:
            ValueError: dp_size or a length is not at least 1, or a trajectory exceeds the usable context under "error".
        """
        if dp_size < 1:
            raise ValueError(f"dp_size = {dp_size}: there is at least one data-parallel rank")
        settings, rng = self.settings, np.random.default_rng(seed)
        segments = SegmentSizes.of(lengths)
        kept, truncated, dropped = self._fit_context(segments.longest())
        segments = segments.at_most(kept)
        tokens, padded = segments.sums(), segments.rounded(settings.multiple)
        cost, budget = TokenCost(settings.linear_cost, settings.quadratic_cost), settings.max_tokens_per_microbatch
        run = padded.sums() if settings.layout == "packed" else padded.longest() * segments.counts()
        # What exceeds the budget is alone in its bin: so is, as rows of a rectangle, what has several segments.
        alone = (segments.counts() > 1) & (settings.layout == "padded")
        planned = np.where(alone, np.maximum(run, budget + 1), run)
        present = np.flatnonzero(kept)
        ties = rng.permutation(len(present))
        order = present[np.lexsort((ties, -tokens[present], -planned[present]))]  # descending
        sizes = planned[order]
        if settings.layout == "packed":
            arranged = arrange_packed(sizes, padded.costs(cost)[order], budget, dp_size)
        else:
            share = settings.max_padding_share
            max_tokens = int(max(tokens.sum() / (1 - share), sizes.sum() / (1 - share / 2)))
            arranged = arrange_padded(sizes, cost, budget, dp_size, max_tokens)
        bin_costs = arranged.bin_costs
        num_bins = len(bin_costs)
        sizes = run[order]
        run = self._tokens_run(sizes, arranged.bin_of, num_bins)
        rank_costs = bin_costs.reshape(dp_size, -1).sum(axis=1)
        return Plan(
            ranks=_ordered(order, arranged.bin_of, bin_costs, dp_size, rng),
            lengths=tuple(kept.tolist()),
            num_microbatches=num_bins // dp_size,
            lower_bound=arranged.bound // dp_size,
            padding_share=1 - float(tokens.sum() / np.maximum(run, settings.multiple).sum()),
            budget_use=float(np.minimum(run, budget).sum() / (num_bins * budget)),
            cost_imbalance=_excess(rank_costs),
            microbatch_imbalance=_excess(bin_costs),
            over_budget=int((sizes > budget).sum()),
            truncated=truncated,
            dropped=dropped,
        )

    def _fit_context(self, lengths: np.ndarray) -> tuple[np.ndarray, dict[str, int], dict[str, int]]:
        """Tokens kept of each trajectory, and how many were cut and dropped, by reason."""
        if (lengths < 1).any():
            raise ValueError(
                f"lengths must be at least 1; {_offenders(lengths, lengths < 1)}: drop them before planning"
            )
        settings = self.settings
        too_long = lengths > settings.usable_context
        if not too_long.any():
            return lengths, {}, {}
        what = (
            f"{int(too_long.sum())} of {len(lengths)} trajectories are longer than {settings.usable_context} tokens "
            f"(context_length {settings.context_length} less a margin of {settings.context_margin:.0%})"
        )
        remedy = "end episodes earlier, shorten observations, or raise the context length"
        if settings.on_too_long == "error":
            raise ValueError(
                f"{what}; {_offenders(lengths, too_long)}: {remedy}; on_too_long = truncate | drop trains without them"
            )
        logger.warning("%s: on_too_long = %s; to keep them, %s", what, settings.on_too_long, remedy)
        counts = {TOO_LONG: int(too_long.sum())}
        if settings.on_too_long == "truncate":
            return np.minimum(lengths, settings.usable_context), counts, {}
        return np.where(too_long, 0, lengths), {}, counts

    def _tokens_run(self, sizes: np.ndarray, bin_of: np.ndarray, num_bins: int) -> np.ndarray:
        """int64 [D * M]: tokens that each microbatch runs, padding included; 0 for one without trajectories."""
        run = np.zeros(num_bins, dtype=np.int64)
        if self.settings.layout == "packed":
            np.add.at(run, bin_of, sizes)
            return run
        np.maximum.at(run, bin_of, sizes)
        return run * np.bincount(bin_of, minlength=num_bins)


def _ordered(
    order: np.ndarray, bin_of: np.ndarray, bin_costs: np.ndarray, dp_size: int, rng: np.random.Generator
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Bins -> places in the caller's list, shares dealt to ranks and microbatches ordered by the seed.

    The m-th microbatches of all ranks are the m-th costliest of each, whatever the order: ranks that meet inside a
    microbatch (expert parallelism) then meet with about the same work.
    """
    bins: list[list[int]] = [[] for _ in bin_costs]
    for place, b in zip(order.tolist(), bin_of.tolist(), strict=True):
        bins[b].append(place)
    per_rank = len(bins) // dp_size
    sequence = rng.permutation(per_rank)
    ranks = []
    for share in rng.permutation(dp_size).tolist():
        own = np.arange(share * per_rank, (share + 1) * per_rank)
        own = own[np.argsort(-bin_costs[own], kind="stable")][sequence]
        ranks.append(tuple(tuple(bins[b]) for b in own))
    return tuple(ranks)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _excess(costs: np.ndarray) -> float:
    """How far the largest is above the mean, as a share of the mean; 0 where all are 0."""
    return float(costs.max() / costs.mean() - 1) if costs.any() else 0.0


def _offenders(lengths: np.ndarray, bad: np.ndarray) -> str:
    places = np.flatnonzero(bad)[:_SHOWN]
    return f"trajectories {places.tolist()} have {lengths[places].tolist()}"
