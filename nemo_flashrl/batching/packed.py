"""Fitting trajectories into as few microbatches as a token budget allows, and proving how few that is.

Shapes: n = trajectories, E = thresholds of a bound. `sizes` is int64 [n] in descending order everywhere, at least 1 and
at most `capacity`: the caller enters a trajectory longer than the budget as one of exactly the budget, so that it
fills a bin and stays alone without a special case here.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort

import numpy as np

_BOUND_WORK = 1 << 16  # n * E of one table of the dual-feasible bound: keeps it under a few milliseconds
_FILL_CANDIDATES = 96  # trajectories that one bin's exact fill chooses from
_FILL_RESOLUTION = 4096  # steps that a budget is divided into by the exact fill; sizes are rounded up to a step
_REFILL_WORK = 200_000  # n * attempts of the search for a packing that is hard to find


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def lower_bound(sizes: np.ndarray, capacity: int, enough: int | None = None) -> int:
    """A number of bins that no packing can go below.

    Args:
        sizes: int64 [n], descending, each in 1..capacity.
        capacity: tokens that one bin holds.
        enough: a number of bins that is known to suffice; the costlier bounds are skipped once it is reached.

    Example: sizes [6, 6, 6, 1] and capacity 10 hold 19 tokens, which two bins could take, but no two of the sixes fit
    together: the bound is 3.
    """
    if len(sizes) == 0:
        return 0
    enough = len(sizes) if enough is None else enough
    bound = -(-int(sizes.sum()) // capacity)
    for stronger in (_count_bound, _dual_feasible_bound):
        if bound >= enough:
            break
        bound = max(bound, stronger(sizes, capacity))
    return bound


def _count_bound(sizes: np.ndarray, capacity: int) -> int:
    """The bound from how many of the long ones fit in one bin.

    At most j of the sizes above capacity/(j+1) share a bin. If q bins hold j of them, those are j*q different ones, so
    the j*q smallest sum to at most q*capacity: that limits q, and every other bin holds at most j-1.
    """
    best = 1
    for j in range(2, 7):
        large = sizes[sizes * (j + 1) > capacity][::-1]
        smallest_sums = np.concatenate(([0], np.cumsum(large)))[::j]
        full = int(np.flatnonzero(smallest_sums <= np.arange(len(smallest_sums)) * capacity)[-1])
        best = max(best, full - (-(len(large) - j * full) // (j - 1)))
    return best


def _dual_feasible_bound(sizes: np.ndarray, capacity: int) -> int:
    """The bound of Fekete and Schepers: transformed sizes that fit whenever the sizes fit, summed.

    For a threshold e, a size above capacity - e counts as a full bin and one below e as nothing; then sizes are rounded
    down to multiples of capacity/(k+1) and counted in units of capacity/k. Either step keeps every feasible bin
    feasible.
    """
    thresholds = np.unique(np.append(sizes[sizes * 2 <= capacity], 0))
    num_thresholds = max(8, _BOUND_WORK // len(sizes))
    if len(thresholds) > num_thresholds:
        thresholds = thresholds[np.linspace(0, len(thresholds) - 1, num_thresholds).astype(np.int64)]
    e = thresholds[:, None]
    kept = np.where(sizes > capacity - e, capacity, np.where(sizes < e, 0, sizes))  # [E, n]
    best = -(-int(kept.sum(axis=1).max()) // capacity)
    for k in range(1, 5):
        steps, remainder = np.divmod((k + 1) * kept, capacity)
        transformed = np.where(remainder == 0, k * kept, capacity * steps)
        best = max(best, -(-int(transformed.sum(axis=1).max()) // (k * capacity)))
    return best


def fewest_bins(sizes: np.ndarray, capacity: int, num_ranks: int) -> tuple[np.ndarray, int, int]:
    """Packs into the least number of bins found that is a multiple of `num_ranks`, at least one per rank.

    Returns:
        bin_of: int64 [n], the bin of each size.
        num_bins: a multiple of num_ranks; some of the bins may be empty.
        bound: a multiple of num_ranks that no packing goes below.
    """
    greedy = best_fit(sizes.tolist(), capacity)
    needed = round_up(max(1, max(greedy, default=0) + 1), num_ranks)
    bound = round_up(max(1, lower_bound(sizes, capacity, enough=needed - num_ranks + 1)), num_ranks)
    for num_bins in range(bound, needed, num_ranks):
        for pack in (_pack_exactly, _pack_by_refilling):
            bins = pack(sizes, capacity, num_bins)
            if bins is not None:
                bin_of = np.zeros(len(sizes), dtype=np.int64)
                for b, inside in enumerate(bins):
                    bin_of[inside] = b
                return bin_of, num_bins, bound
    return np.array(greedy, dtype=np.int64), needed, bound


def best_fit(sizes: list[int], capacity: int) -> list[int]:
    """The bin of each size by best-fit decreasing: it goes where it leaves the least room."""
    rooms: list[tuple[int, int]] = []  # (room, bin), ascending
    bin_of: list[int] = []
    for size in sizes:
        place = bisect_left(rooms, (size, -1))
        if place < len(rooms):
            room, b = rooms.pop(place)
        else:
            room, b = capacity, len(rooms)
        insort(rooms, (room - size, b))
        bin_of.append(b)
    return bin_of


def _in_steps(sizes: np.ndarray, capacity: int) -> tuple[list[int], int]:
    """Sizes, rounded up, and capacity, rounded down, in steps coarse enough for the exact fill."""
    step = -(-capacity // _FILL_RESOLUTION)
    return [-(-size // step) for size in sizes.tolist()], capacity // step


def _pack_exactly(sizes: np.ndarray, capacity: int, num_bins: int) -> list[list[int]] | None:
    """Each bin takes the longest that is left and the subset of the others that fills it best."""
    steps, capacity_steps = _in_steps(sizes, capacity)
    left = list(range(len(steps)))
    bins: list[list[int]] = []
    while left and len(bins) < num_bins:
        longest = left.pop(0)
        room = capacity_steps - steps[longest]
        candidates = left[bisect_left(left, -room, key=lambda i: -steps[i]) :]  # those that still fit
        if len(candidates) > _FILL_CANDIDATES:  # the longest, and the shortest for the last gap
            candidates = candidates[: _FILL_CANDIDATES // 2] + candidates[-_FILL_CANDIDATES // 2 :]
        chosen = set(_fullest_subset(candidates, steps, room))
        left = [i for i in left if i not in chosen]
        bins.append([longest, *chosen])
    return None if left else bins


def _pack_by_refilling(sizes: np.ndarray, capacity: int, num_bins: int) -> list[list[int]] | None:
    """Best-fit's fullest bins are kept and the others emptied into a pool; then a few bins at a time are emptied into
    it too and filled again as full as can be, until the pool is empty. The bins never get less full."""
    steps, capacity_steps = _in_steps(sizes, capacity)
    rng = random.Random(0)
    bins: list[list[int]] = [[] for _ in sizes]
    for i, b in enumerate(best_fit(steps, capacity_steps)):
        bins[b].append(i)
    bins.sort(key=lambda inside: -sum(steps[i] for i in inside))
    pool, bins = sum(bins[num_bins:], []), bins[:num_bins]
    for attempt in range(_REFILL_WORK // len(sizes)):
        if not pool:
            return bins
        emptied = rng.sample(range(num_bins), min(num_bins, 1 + attempt % 4))
        candidates = sorted(sum((bins[b] for b in emptied), pool))  # places ascend, sizes descend
        before, refilled = sum(steps[i] for b in emptied for i in bins[b]), []
        for _ in emptied:
            refilled.append(_fullest_subset(candidates, steps, capacity_steps))
            candidates = [i for i in candidates if i not in refilled[-1]]
        if sum(steps[i] for inside in refilled for i in inside) >= before:
            pool = candidates
            for b, inside in zip(emptied, refilled, strict=True):
                bins[b] = inside
    return None if pool else bins


def _fullest_subset(candidates: list[int], steps: list[int], room: int) -> list[int]:
    """The candidates whose steps sum to the most that is not above `room`.

    Bit s of a mask says that some subset of the candidates so far sums to s, so that a candidate is one shift.
    """
    limit = (1 << (room + 1)) - 1
    reachable = [1]
    for i in candidates:
        reachable.append((reachable[-1] | reachable[-1] << steps[i]) & limit)
        if reachable[-1] >> room:
            break
    total = reachable[-1].bit_length() - 1
    chosen = []
    for place in range(len(reachable) - 2, -1, -1):
        if not reachable[place] >> total & 1:
            chosen.append(candidates[place])
            total -= steps[candidates[place]]
    return chosen
