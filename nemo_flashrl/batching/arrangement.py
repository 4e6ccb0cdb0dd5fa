"""From sorted lengths to microbatches, for the packed and the padded layout.

The stages: the fewest bins (packed.py, padded.py) -> several ways to hand them to the ranks -> exchanges that even
the ranks out (balancing) -> the way whose costliest rank is cheapest.

Shapes: n = trajectories, K = bins of all ranks together; rank r owns bins r * (K / ranks) to (r + 1) * (K / ranks) - 1.
`sizes` is int64 [n], descending, rounded up to the multiple. Nothing here is random but for fixed streams, so that a
plan's quality depends on the lengths alone, neither on their order nor on a seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from nemo_flashrl.batching.balancing import Bins, PackedBins, PaddedBins, TokenCost, even_out
from nemo_flashrl.batching.packed import fewest_bins, round_up
from nemo_flashrl.batching.padded import RowGrouping

_START_WORK = 512  # trajectories over all starts: small batches can be tried often, and need it
_MAX_STARTS = 6
_EVEN = 2e-5  # an imbalance below this is as good as none
_UNEVEN = 5e-3  # an imbalance of dealt groups above this is worth the second way
_TOLERATED = 0.03  # an imbalance above this is worth a further bin a rank,
_WORTH = 0.02  # if the costliest rank becomes cheaper by at least this share,
_MAX_EXTRA = 3  # at most so many times
_LOOKS = 64  # bins of a rank that are looked at before the next rank is


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Which bin each trajectory is in."""

    bin_of: np.ndarray  # int64 [n]
    bin_costs: np.ndarray  # float64 [K]
    bound: int  # no arrangement of this layout has fewer bins, a multiple of the ranks


def _costliest_rank(bins: Bins, num_ranks: int) -> float:
    return float(bins.bin_costs.reshape(num_ranks, -1).sum(axis=1).max())


def _imbalance(bins: Bins, num_ranks: int) -> float:
    return _costliest_rank(bins, num_ranks) * num_ranks / float(bins.bin_costs.sum()) - 1


def least_costliest_rank(costs: np.ndarray, num_ranks: int) -> float:
    """A cost that the costliest rank cannot go below, whoever gets what; `costs` [n] descends.

    Of the j * ranks + 1 costliest, some rank has j + 1, which cost at least as much as the j + 1 cheapest of them.
    """
    sums = np.concatenate(([0.0], np.cumsum(costs)))
    j = np.arange(-(-len(costs) // num_ranks))  # those with j * ranks + 1 <= n
    return float(max(sums[-1] / num_ranks, np.max(sums[j * num_ranks + 1] - sums[j * num_ranks - j], initial=0.0)))


def arrange_packed(sizes: np.ndarray, costs: np.ndarray, capacity: int, num_ranks: int) -> Arrangement:
    """Bins whose sizes sum to at most `capacity`; costs even over the ranks first, over a rank's bins second.

    Args:
        sizes: int64 [n], descending; one above the capacity gets a bin of its own.
        costs: float64 [n].
        capacity: tokens a bin holds.
        num_ranks: data-parallel ranks.
    """
    fit_sizes = np.minimum(sizes, capacity)
    tight, num_bins, bound = fewest_bins(fit_sizes, capacity, num_ranks)
    least = least_costliest_rank(np.sort(costs)[::-1], num_ranks) * (1 + _EVEN)  # of several segments: not as sizes
    best, rng = None, np.random.default_rng(0)
    for attempt in range(min(_MAX_STARTS, max(1, _START_WORK // max(1, len(sizes))))):
        shaken = costs * (1 + 0.3 * rng.random(len(sizes))) if attempt else costs
        start = _spread(fit_sizes, costs, np.argsort(-shaken, kind="stable"), capacity, num_ranks, num_bins)
        if start is None and best is None:  # the budget is tight: the packing itself is the start that is left
            start = _deal(tight, np.bincount(tight, costs, num_bins), num_ranks)
        if start is None:
            continue
        bins = PackedBins(fit_sizes, costs, start, num_bins, capacity)
        even_out(bins, num_ranks)
        if best is None or _costliest_rank(bins, num_ranks) < _costliest_rank(best, num_ranks):
            best = bins
        if _costliest_rank(best, num_ranks) <= least:
            break
    _even_out_inside_ranks(best, num_ranks)
    return Arrangement(best.bin_of, best.bin_costs, bound)


def _even_out_inside_ranks(bins: PackedBins, num_ranks: int) -> None:
    """Lowers each rank's costliest bin, which every stage of a pipeline waits for; the ranks' sums stay."""
    per_rank = len(bins.bin_costs) // num_ranks
    for rank in range(num_ranks):
        inside = np.flatnonzero(bins.bin_of // per_rank == rank)
        first = rank * per_rank
        own = PackedBins(bins.sizes[inside], bins.costs[inside], bins.bin_of[inside] - first, per_rank, bins.capacity)
        even_out(own, per_rank, tolerance=1e-2, partners=3)
        bins.bin_of[inside] = own.bin_of + first
        bins.bin_loads[first : first + per_rank] = own.bin_loads
        bins.bin_costs[first : first + per_rank] = own.bin_costs


def _deal(bin_of: np.ndarray, bin_costs: np.ndarray, num_ranks: int) -> np.ndarray:
    """Hands finished bins to the ranks, costliest first, each to the cheapest rank that has a place left."""
    per_rank = len(bin_costs) // num_ranks
    rank_costs, taken = np.zeros(num_ranks), np.zeros(num_ranks, dtype=np.int64)
    new_name = np.zeros(len(bin_costs), dtype=np.int64)
    for b in np.argsort(-bin_costs, kind="stable"):
        rank = int(np.where(taken < per_rank, rank_costs, np.inf).argmin())
        new_name[b] = rank * per_rank + taken[rank]
        taken[rank] += 1
        rank_costs[rank] += bin_costs[b]
    return new_name[bin_of]


def _spread(
    sizes: np.ndarray, costs: np.ndarray, order: np.ndarray, capacity: int, num_ranks: int, num_bins: int
) -> np.ndarray | None:
    """Each trajectory to the cheapest bin of the cheapest rank; to the next bin, then the next rank, if it is full.

    None if one fits nowhere that was looked at: the packing is the start then.
    """
    per_rank = num_bins // num_ranks
    ranks = [(0.0, rank) for rank in range(num_ranks)]  # heaps of (cost, which)
    bins = [[(0.0, b) for b in range(rank * per_rank, (rank + 1) * per_rank)] for rank in range(num_ranks)]
    loads = [0] * num_bins
    bin_of = np.zeros(len(sizes), dtype=np.int64)
    for i, size, cost in zip(order.tolist(), sizes[order].tolist(), costs[order].tolist(), strict=True):
        passed_ranks, found = [], None
        while ranks and found is None:
            rank_cost, rank = heappop(ranks)
            passed_bins = []
            while bins[rank] and len(passed_bins) < _LOOKS and found is None:
                bin_cost, b = heappop(bins[rank])
                found = b if loads[b] + size <= capacity else None
                passed_bins.append((bin_cost + cost if found is not None else bin_cost, b))
            for entry in passed_bins:
                heappush(bins[rank], entry)
            passed_ranks.append((rank_cost + cost if found is not None else rank_cost, rank))
        for entry in passed_ranks:
            heappush(ranks, entry)
        if found is None:
            return None
        loads[found] += size
        bin_of[i] = found
    return bin_of


def arrange_padded(sizes: np.ndarray, cost: TokenCost, capacity: int, num_ranks: int, max_tokens: int) -> Arrangement:
    """Bins with rows * longest <= `capacity`: the fewest that run no more than `max_tokens`, padding included.

    Rows of very different lengths cannot share a padded bin, so that few bins a rank may not be evened out. Then each
    rank gets up to three bins more, if that makes the costliest rank noticeably cheaper: the step ends when that rank
    does.

    Args:
        sizes: int64 [n], descending; one above the capacity gets a bin of its own.
        cost: of one row, padding included.
        capacity: tokens a bin holds.
        num_ranks: data-parallel ranks.
        max_tokens: at least the sum of the sizes.
    """
    if len(sizes) == 0:
        return Arrangement(np.zeros(0, dtype=np.int64), np.zeros(num_ranks), num_ranks)
    grouping = RowGrouping(sizes, capacity)
    fewest, fewest_bound = grouping.fewest(max_tokens)
    if round_up(fewest, num_ranks) > round_up(fewest_bound, num_ranks):
        grouping = grouping.refined(max_tokens)
        fewest, fewest_bound = grouping.fewest(max_tokens)
    least = least_costliest_rank(cost.of(sizes), num_ranks) * (1 + _EVEN)
    best = None
    for extra in range(_MAX_EXTRA + 1):
        num_bins = round_up(fewest, num_ranks) + extra * num_ranks
        bins = None
        for start in _padded_starts(grouping, cost, num_ranks, num_bins):
            tried = PaddedBins(sizes, cost, start, num_bins, capacity, max_tokens)
            even_out(tried, num_ranks)
            fits = tried.tokens() <= max_tokens  # grouping inside the ranks pads more
            if bins is None or (fits and _costliest_rank(tried, num_ranks) < _costliest_rank(bins, num_ranks)):
                bins = tried
            if _imbalance(bins, num_ranks) <= _UNEVEN:
                break
        if best is None or _costliest_rank(bins, num_ranks) < _costliest_rank(best, num_ranks) * (1 - _WORTH):
            best = bins
        if _imbalance(best, num_ranks) <= _TOLERATED or _costliest_rank(best, num_ranks) <= least:
            break
    return Arrangement(best.bin_of, best.bin_costs, round_up(fewest_bound, num_ranks))


def _padded_starts(grouping: RowGrouping, cost: TokenCost, num_ranks: int, num_bins: int) -> Iterator[np.ndarray]:
    """Ways to hand rows to ranks and bins: what pads least first, then what unlike groups may need."""
    yield _dealt_groups(grouping, cost, num_ranks, num_bins)
    start = _grouped_shares(grouping, cost, num_ranks, num_bins)
    if start is not None:
        yield start


def _dealt_groups(grouping: RowGrouping, cost: TokenCost, num_ranks: int, num_bins: int) -> np.ndarray:
    """Rows grouped over the whole batch, which pads least, and the groups dealt to the ranks."""
    bin_of = _groups_from_cuts(grouping.cuts(num_bins))
    longest = grouping.sizes[np.searchsorted(bin_of, bin_of)]  # of each row's bin: its first
    return _deal(bin_of, np.bincount(bin_of, cost.of(longest), num_bins), num_ranks)


def _groups_from_cuts(cuts: list[int]) -> np.ndarray:
    return np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))


def _grouped_shares(grouping: RowGrouping, cost: TokenCost, num_ranks: int, num_bins: int) -> np.ndarray | None:
    """Rows dealt to the ranks, longest first, and grouped inside each; None if they do not fit the bins that way.

    A row goes to the cheapest rank that has room for it, in the bin last opened there or in one more.
    """
    sizes = grouping.sizes
    per_rank = num_bins // num_ranks
    rank_costs, rank_of = np.zeros(num_ranks), np.zeros(len(sizes), dtype=np.int64)
    room, bins_left = np.zeros(num_ranks, dtype=np.int64), np.full(num_ranks, per_rank)
    for i, (row_cost, max_rows) in enumerate(zip(cost.of(sizes).tolist(), grouping.max_rows.tolist(), strict=True)):
        takes = (room > 0) | (bins_left > 0)
        if not takes.any():
            return None
        rank_of[i] = rank = int(np.where(takes, rank_costs, np.inf).argmin())
        if room[rank] == 0:
            bins_left[rank] -= 1
            room[rank] = max_rows
        room[rank] -= 1
        rank_costs[rank] += row_cost
    bin_of = np.zeros(len(sizes), dtype=np.int64)
    for rank in range(num_ranks):
        rows = np.flatnonzero(rank_of == rank)
        if len(rows):
            own = RowGrouping(sizes[rows], grouping.capacity)
            bin_of[rows] = _groups_from_cuts(own.cuts(per_rank)) + rank * per_rank
    return bin_of
