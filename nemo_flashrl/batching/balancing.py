"""Evening out the cost of groups of microbatches by exchanging trajectories between them.

Shapes: n = trajectories, K = bins (microbatches of all ranks together), G/T/k = trajectories of the costlier group,
trajectories of the cheaper group, bins of the cheaper group. Bin b belongs to group b // (K / groups).
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

_SIDE = 48  # trajectories a side (and bins) that one round looks at: more of them would not find a better exchange


class TokenCost(NamedTuple):
    """What a trajectory of S tokens costs: linear * S for the matrix products, quadratic * S^2 for attention."""

    linear: float
    quadratic: float

    def of(self, tokens: np.ndarray) -> np.ndarray:
        """float64, of the shape of `tokens`."""
        tokens = np.asarray(tokens, dtype=np.float64)
        return tokens * (self.linear + self.quadratic * tokens)


@dataclass(frozen=True, slots=True)
class SegmentSizes:
    """Tokens of every segment, and whose it is; a trajectory of several is planned as one piece."""

    tokens: np.ndarray  # int64 [segments], those of a trajectory side by side
    owner: np.ndarray  # int64 [segments], ascending, in 0..n-1

    @classmethod
    def of(cls, lengths: Sequence[int | Sequence[int]]) -> SegmentSizes:
        """`lengths`: tokens of each trajectory, or of each of its segments."""
        parts = [length if isinstance(length, Sequence) else (length,) for length in lengths]
        tokens = np.array([tokens for part in parts for tokens in part], dtype=np.int64)
        return cls(tokens, np.repeat(np.arange(len(parts)), [len(part) for part in parts]))

    def at_most(self, limits: np.ndarray) -> SegmentSizes:
        """Each segment cut to its trajectory's limit, int64 [n]."""
        return replace(self, tokens=np.minimum(self.tokens, limits[self.owner]))

    def rounded(self, multiple: int) -> SegmentSizes:
        """Each segment padded."""
        return replace(self, tokens=-(-self.tokens // multiple) * multiple)

    def longest(self) -> np.ndarray:
        """int64 [n]: of each trajectory."""
        return np.maximum.reduceat(self.tokens, self._starts()) if len(self.tokens) else self.tokens

    def sums(self) -> np.ndarray:
        """int64 [n]: tokens of each trajectory."""
        return np.add.reduceat(self.tokens, self._starts()) if len(self.tokens) else self.tokens

    def counts(self) -> np.ndarray:
        """int64 [n]: segments of each trajectory."""
        return np.bincount(self.owner)

    def costs(self, cost: TokenCost) -> np.ndarray:
        """float64 [n]: attention stays inside a segment."""
        return np.bincount(self.owner, cost.of(self.tokens))

    def _starts(self) -> np.ndarray:
        return np.searchsorted(self.owner, np.arange(self.owner[-1] + 1))


class Bins(Protocol):
    """What `even_out` needs from a layout: costs, and what an exchange would do to them."""

    bin_of: np.ndarray  # int64 [n]
    bin_costs: np.ndarray  # float64 [K]

    def exchanges(self, givers: np.ndarray, takers: np.ndarray, bins: np.ndarray) -> tuple[np.ndarray, np.ndarray]: ...

    def move(self, trajectory: int, to: int) -> None: ...

    def swap_bins(self, a: int, b: int) -> None: ...


class _BinsOfItems(abc.ABC):
    """The bookkeeping that both layouts share."""

    sizes: np.ndarray
    bin_of: np.ndarray

    def move(self, trajectory: int, to: int) -> None:
        """Puts one trajectory into bin `to`; of an exchange, both moves follow each other."""
        b = int(self.bin_of[trajectory])
        self.bin_of[trajectory] = to
        self._refresh(b)
        self._refresh(to)

    def swap_bins(self, a: int, b: int) -> None:
        """Exchanges all that two bins hold."""
        in_a, in_b = self.bin_of == a, self.bin_of == b
        self.bin_of[in_a], self.bin_of[in_b] = b, a
        self._refresh(a)
        self._refresh(b)

    @abc.abstractmethod
    def _refresh(self, b: int) -> None:
        """Count again what bin b holds."""


class PackedBins(_BinsOfItems):
    """Bins of the packed layout: tokens and costs add up.

    Args:
        sizes: int64 [n], tokens as the budget counts them, descending.
        costs: float64 [n].
        bin_of: int64 [n]; copied.
        num_bins: K.
        capacity: tokens that one bin holds.
    """

    def __init__(self, sizes: np.ndarray, costs: np.ndarray, bin_of: np.ndarray, num_bins: int, capacity: int) -> None:
        self.sizes, self.costs, self.bin_of, self.capacity = sizes, costs, bin_of.copy(), capacity
        self.bin_loads = np.zeros(num_bins, dtype=np.int64)
        np.add.at(self.bin_loads, bin_of, sizes)
        self.bin_costs = np.bincount(bin_of, costs, num_bins)

    def _refresh(self, b: int) -> None:
        inside = np.flatnonzero(self.bin_of == b)
        self.bin_loads[b] = self.sizes[inside].sum()
        self.bin_costs[b] = self.costs[inside].sum()

    def exchanges(self, givers: np.ndarray, takers: np.ndarray, bins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cost changes of the givers' and the takers' group, float64 [G, T + k] each, inf where it does not fit.

        Column j < T exchanges a giver with taker j; column T + j moves the giver into bin j and takes nothing back.
        Whether a taker fits the giver's bin is not asked: only a shorter one, which does, makes the group cheaper.
        """
        nothing = np.zeros(len(bins), dtype=np.int64)
        back_size = np.concatenate((self.sizes[takers], nothing))
        back_cost = np.concatenate((self.costs[takers], nothing))
        room_there = self.capacity - self.bin_loads[np.concatenate((self.bin_of[takers], bins))]
        growth = self.sizes[givers][:, None] - back_size
        gained = self.costs[givers][:, None] - back_cost
        gained[growth > room_there] = np.inf
        return -gained, gained


class PaddedBins(_BinsOfItems):
    """Bins of the padded layout: every row is as long as the longest row of its bin.

    Args:
        sizes: int64 [n], row lengths, already rounded up to the multiple, descending.
        cost: of one row.
        bin_of: int64 [n]; copied.
        num_bins: K.
        capacity: tokens that one bin holds; a row above it is alone in its bin.
        max_tokens: no exchange may bring rows * longest, summed over the bins, above this.
    """

    def __init__(
        self,
        sizes: np.ndarray,
        cost: TokenCost,
        bin_of: np.ndarray,
        num_bins: int,
        capacity: int,
        max_tokens: int,
    ) -> None:
        self.sizes, self.bin_of, self.capacity, self.max_tokens = sizes, bin_of.copy(), capacity, max_tokens
        self.cost = cost
        self.rows = np.bincount(bin_of, minlength=num_bins)
        self.longest = np.zeros(num_bins, dtype=np.int64)
        np.maximum.at(self.longest, bin_of, sizes)
        self.bin_costs = self._cost(self.rows, self.longest)
        self.longest_without = self.longest[bin_of]  # the longest of the trajectory's bin, the trajectory left out
        filled, first = np.unique(bin_of, return_index=True)  # sizes descend: the first of a bin is its longest
        second = np.zeros(num_bins, dtype=np.int64)
        np.maximum.at(second, np.delete(bin_of, first), np.delete(sizes, first))
        self.longest_without[first] = second[filled]

    def _refresh(self, b: int) -> None:
        inside = np.flatnonzero(self.bin_of == b)  # in descending order of size
        longest, second = (int(self.sizes[i]) for i in inside[:2]) if len(inside) > 1 else (self.sizes[inside].sum(), 0)
        self.rows[b], self.longest[b] = len(inside), longest
        self.bin_costs[b] = self._cost(self.rows[b], longest)
        self.longest_without[inside] = longest
        self.longest_without[inside[:1]] = second

    def _cost(self, rows: np.ndarray, longest: np.ndarray) -> np.ndarray:
        return rows * self.cost.of(longest)

    def _fits(self, rows: np.ndarray, longest: np.ndarray) -> np.ndarray:
        return rows * np.minimum(longest, self.capacity) <= self.capacity

    def tokens(self) -> int:
        """Tokens that are run, padding included."""
        return int((self.rows * self.longest).sum())

    def exchanges(self, givers: np.ndarray, takers: np.ndarray, bins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As PackedBins.exchanges; also inf where the padding would come to more than max_tokens allows."""
        num_takers, here = len(takers), self.bin_of[givers][:, None]
        there = np.concatenate((self.bin_of[takers], bins))
        back = np.concatenate((self.sizes[takers], np.zeros(len(bins), dtype=np.int64)))
        stays = np.concatenate((self.longest_without[takers], self.longest[bins]))
        moves = np.arange(len(there)) >= num_takers
        rows_here, rows_there = self.rows[here] - moves, self.rows[there] + moves
        longest_here = np.maximum(self.longest_without[givers][:, None], back)
        longest_there = np.maximum(stays, self.sizes[givers][:, None])
        tokens = rows_here * longest_here + rows_there * longest_there
        growth = tokens - (self.rows * self.longest)[here] - (self.rows * self.longest)[there]
        bad = ~(self._fits(rows_here, longest_here) & self._fits(rows_there, longest_there))
        bad |= growth > self.max_tokens - self.tokens()
        lost = self._cost(rows_here, longest_here) - self.bin_costs[here]
        gained = self._cost(rows_there, longest_there) - self.bin_costs[there]
        gained[bad] = np.inf
        return lost, gained


def even_out(
    bins: Bins, num_groups: int, *, tolerance: float = 2e-5, partners: int = 12, max_rounds: int = 400
) -> None:
    """Lowers the cost of the costliest group, step by step, in place.

    Each round takes the costliest group and looks through the `partners` cheapest ones, cheapest first, for the
    exchange of two trajectories, the move of one, or the exchange of two whole bins that leaves the lower maximum of
    the two. It ends when the costliest group finds none, or is within `tolerance` of the mean.
    """
    per_group = len(bins.bin_costs) // num_groups
    for _ in range(max_rounds):
        costs = bins.bin_costs.reshape(num_groups, per_group).sum(axis=1)
        top = int(costs.argmax())
        if costs[top] <= costs.mean() * (1 + tolerance):
            return
        cheapest = np.argsort(costs, kind="stable")[:partners]
        if not any(costs[p] < costs[top] and _exchange(bins, top, int(p), costs, per_group) for p in cheapest):
            return


def _sample(places: np.ndarray) -> np.ndarray:
    """At most _SIDE of them, evenly spaced: trajectories are sorted by length, so that all lengths stay represented."""
    return places if len(places) <= _SIDE else places[np.linspace(0, len(places) - 1, _SIDE).astype(np.int64)]


def _exchange(bins: Bins, top: int, partner: int, costs: np.ndarray, per_group: int) -> bool:
    """Carries out the best exchange of two groups; False if none lowers the maximum of the two."""
    group_of = bins.bin_of // per_group
    givers, takers = (_sample(np.flatnonzero(group_of == g)) for g in (top, partner))
    own, other = (_sample(np.arange(g * per_group, (g + 1) * per_group)) for g in (top, partner))
    difference = bins.bin_costs[own][:, None] - bins.bin_costs[other]
    whole = np.maximum(costs[top] - difference, costs[partner] + difference)
    lost, gained = bins.exchanges(givers, takers, other)
    single = np.maximum(costs[top] + lost, costs[partner] + gained)
    best_whole, best_single = whole.min(), single.min(initial=np.inf)
    if min(best_whole, best_single) >= costs[top] * (1 - 1e-9):
        return False
    if best_whole <= best_single:
        a, b = divmod(int(whole.argmin()), len(other))
        bins.swap_bins(int(own[a]), int(other[b]))
        return True
    g, column = divmod(int(single.argmin()), len(takers) + len(other))
    home = int(bins.bin_of[givers[g]])
    if column < len(takers):
        there = int(bins.bin_of[takers[column]])
        bins.move(int(takers[column]), home)
        bins.move(int(givers[g]), there)
    else:
        bins.move(int(givers[g]), int(other[column - len(takers)]))
    return True
