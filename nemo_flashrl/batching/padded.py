"""The padded layout's grouping: rows sorted by length, cut into runs so that little is padded.

Shapes: n = trajectories, P = prices. `sizes` is int64 [n], descending, rounded up to the multiple. A group of rows
i..j-1 costs (j - i) * sizes[i] tokens, because the first of them is the longest.

Runs of the sorted rows are enough: if a row of the group with the longer longest row is shorter than a row of another
group, exchanging the two lengthens neither group. And w(i, j) = (j - i) * sizes[i] obeys the quadrangle inequality, so
that the fewest tokens with exactly K groups are a convex function of K, and a price per group finds its points.
"""

from __future__ import annotations

import numpy as np

_NUM_PRICES = 64


class RowGrouping:
    """Groups of rows that run the fewest tokens, for any number of groups.

    Args:
        sizes: int64 [n], descending, each at least 1.
        capacity: tokens that a group may hold; a row above it is alone in its group.
        prices: what a group costs, in tokens, one path for each; by default spread over all that can matter.

    Example: sizes [100, 90, 10, 10] and capacity 200. The fewest groups are two, and the best two are [100, 90] and
    [10, 10] with 220 tokens; with three groups no row is padded and 210 are left.
    """

    def __init__(self, sizes: np.ndarray, capacity: int, prices: np.ndarray | None = None) -> None:
        self.sizes, self.capacity = sizes, capacity
        self.max_rows = np.maximum(1, capacity // sizes)
        self._count_bits = max(1, len(sizes).bit_length())  # of a path's value: its groups, so that ties go to fewer
        if prices is None:
            prices = np.geomspace(1, 2 + self._padding_of_fewest(), _NUM_PRICES)  # more groups cannot save as much
        self._prices = np.unique(np.append(0, prices).astype(np.int64))  # [P], ascending
        self._values = self._cheapest_paths()
        totals = self._values[-1]
        self.counts = totals & ((1 << self._count_bits) - 1)  # int64 [P], groups of the cheapest path, falling
        self.tokens = (totals >> self._count_bits) - self.counts * self._prices  # int64 [P], of that path, rising

    def _padding_of_fewest(self) -> int:
        """Padding of the fewest groups, each filled with the longest rows that are left."""
        cuts = [0]
        while cuts[-1] < len(self.sizes):
            cuts.append(min(len(self.sizes), cuts[-1] + int(self.max_rows[cuts[-1]])))
        return self._tokens_of(cuts) - int(self.sizes.sum())

    def _cheapest_paths(self) -> np.ndarray:
        """int64 [n + 1, P]: the least price * groups + tokens over the first j rows; its groups in the low bits."""
        values = np.full((len(self.sizes) + 1, len(self._prices)), np.iinfo(np.int64).max)
        values[0] = 0
        price = (self._prices << self._count_bits) + 1
        row_counts = np.arange(1, int(self.max_rows.max(initial=1)) + 1)[:, None] << self._count_bits
        for i, (size, rows) in enumerate(zip(self.sizes.tolist(), self.max_rows.tolist(), strict=True)):
            reached = values[i + 1 : i + 1 + rows]
            np.minimum(reached, (values[i] + price) + row_counts[: len(reached)] * size, out=reached)
        return values

    def refined(self, max_tokens: int) -> RowGrouping:
        """The same rows with prices close together where the least tokens pass `max_tokens`."""
        at = int(np.flatnonzero(self.tokens <= max_tokens)[-1])
        around = np.linspace(self._prices[at], self._prices[min(at + 1, len(self._prices) - 1)], _NUM_PRICES)
        return RowGrouping(self.sizes, self.capacity, np.append(around, self._prices[-1]))

    def fewest(self, max_tokens: int) -> tuple[int, int]:
        """How many groups it takes to run at most `max_tokens`: (a number that does, a bound that none goes below).

        The two differ only where the wanted number lies between two points of the prices. `max_tokens` must allow for
        one row a group, that is, be at least the sum of the sizes.
        """
        at = int(np.flatnonzero(self.tokens <= max_tokens)[-1])
        found = int(self.counts[at])
        while found > self.counts[-1] and self._tokens_of(self.cuts(found - 1)) <= max_tokens:
            found -= 1
        # A price p turns any K groups into a bound on their tokens: tokens(K) >= value(p) - p * K.
        slack = (self._values[-1] >> self._count_bits) - max_tokens
        priced = self._prices > 0
        bound = int(np.max(-(-slack[priced] // self._prices[priced]), initial=1))
        return found, min(found, max(bound, int(self.counts[-1])))

    def _tokens_of(self, cuts: list[int]) -> int:
        return int((np.diff(cuts) * self.sizes[cuts[:-1]]).sum())

    def cuts(self, num_groups: int) -> list[int]:
        """Where the rows are cut into `num_groups` runs: num_groups + 1 places, from 0 to n.

        With more groups than rows, one row a group. `num_groups` must be at least the fewest that the capacity allows.
        """
        num_groups = min(num_groups, len(self.sizes))
        cheap = int(np.flatnonzero(self.counts >= num_groups)[-1]) if self.counts[0] >= num_groups else None
        if cheap is None:  # even a group that costs nothing is not wanted: equal lengths, cut anywhere
            return self._split(self._path(0), num_groups)
        more = self._path(cheap)
        if len(more) - 1 == num_groups:
            return more
        fewer = self._path(cheap + 1)
        # The first groups of one path and the last of the other make a path of the wanted number. Where a group of
        # `fewer` covers a group of `more` it costs no more than the two paths do together (the quadrangle inequality).
        shift = num_groups - (len(fewer) - 1)
        for i in range(len(fewer) - 1):
            j = i + shift
            if fewer[i] <= more[j] and more[j + 1] <= fewer[i + 1]:
                return more[: j + 1] + fewer[i + 1 :]
        raise AssertionError("two monotone paths of different counts always cover each other somewhere")

    def _path(self, price_index: int) -> list[int]:
        """The cuts of the cheapest path at one price, found from its end."""
        values, price = self._values[:, price_index], (self._prices[price_index] << self._count_bits) + 1
        j, cuts = len(self.sizes), [len(self.sizes)]
        while j > 0:
            i = np.arange(max(0, j - int(self.max_rows[j - 1])), j)
            reached = values[i] + price + (((j - i) * self.sizes[i]) << self._count_bits)
            j = int(i[(reached == values[j]) & (j - i <= self.max_rows[i])][0])
            cuts.append(j)
        return cuts[::-1]

    def _split(self, cuts: list[int], num_groups: int) -> list[int]:
        """Adds cuts inside the largest groups until there are enough; a further cut never adds padding."""
        cuts = list(cuts)
        while len(cuts) - 1 < num_groups:
            at = int(np.argmax(np.diff(cuts)))
            cuts.insert(at + 1, (cuts[at] + cuts[at + 1]) // 2)
        return cuts
