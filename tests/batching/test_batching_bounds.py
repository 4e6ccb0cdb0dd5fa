"""The planner's bounds and packings against the exact optima of small cases."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_flashrl.batching.packed import fewest_bins, lower_bound, round_up
from nemo_flashrl.batching.padded import RowGrouping

PROPERTY = settings(max_examples=150, deadline=None, derandomize=True)


class TestBounds:
    def test_a_bound_beyond_the_sum(self):
        assert lower_bound(np.array([6, 6, 6, 1]), 10) == 3  # 19 tokens, but no two sixes fit
        assert lower_bound(np.array([4, 4, 4, 4, 4, 4, 4]), 10) == 4  # 28 tokens, but two a bin
        # 20 tokens, and 3 + 4 + 4 is above 10 already: no bin holds three.
        assert lower_bound(np.array([5, 4, 4, 4, 3]), 10) == 3
        assert lower_bound(np.array([7, 7, 2]), 8) == 3  # 16 tokens, but nothing goes with a seven
        assert lower_bound(np.array([6, 6, 6, 4]), 11) == 3  # 22 tokens, but no two sixes fit
        assert lower_bound(np.array([], dtype=np.int64), 10) == 0

    @PROPERTY
    @given(sizes=st.lists(st.integers(1, 24), min_size=1, max_size=9), capacity=st.integers(24, 40))
    def test_the_exact_optimum_lies_between_bound_and_packing(self, sizes, capacity):
        descending = np.sort(np.array(sizes))[::-1]
        optimum = exact_bins(descending.tolist(), capacity)
        assert lower_bound(descending, capacity) <= optimum
        for num_ranks in (1, 3):
            bin_of, num_bins, bound = fewest_bins(descending, capacity, num_ranks)
            assert bound <= round_up(optimum, num_ranks) <= num_bins
            assert np.bincount(bin_of, descending, num_bins).max() <= capacity

    def test_a_packing_that_best_fit_misses(self):
        # Best-fit decreasing opens a third bin; 5 + 3 + 2 and 4 + 4 + 2 fill two.
        sizes = np.array([5, 4, 4, 3, 2, 2])
        bin_of, num_bins, bound = fewest_bins(sizes, 10, num_ranks=1)
        assert (num_bins, bound) == (2, 2)
        assert np.bincount(bin_of, sizes).tolist() == [10, 10]

    def test_a_packing_that_filling_one_bin_at_a_time_misses(self):
        # 9 + 4 + 4, 7 + 6 + 4.. must not be closed by the fullest subset; 17 | 9 + 7 | 7 + 6 + 4 | 7 + 5 + 4 fill four.
        sizes = np.array([17, 9, 7, 7, 7, 6, 5, 4, 4])
        bin_of, num_bins, bound = fewest_bins(sizes, 17, num_ranks=1)
        assert (num_bins, bound) == (4, 4)
        assert sorted(np.bincount(bin_of, sizes).tolist()) == [16, 16, 17, 17]

    @PROPERTY
    @given(
        sizes=st.lists(st.integers(1, 60), min_size=1, max_size=12),
        capacity=st.integers(1, 200),
        share=st.sampled_from([0.0, 0.05, 0.3]),
    )
    def test_padded_groups_against_every_way_of_cutting(self, sizes, capacity, share):
        descending = np.sort(np.array(sizes))[::-1]
        fewest_tokens = exact_groups(descending.tolist(), capacity)  # number of groups -> tokens
        grouping = RowGrouping(descending, capacity)
        max_tokens = int(sum(sizes) / (1 - share))
        needed = min(count for count, tokens in fewest_tokens.items() if tokens <= max_tokens)
        found, bound = grouping.refined(max_tokens).fewest(max_tokens)
        assert bound <= needed <= found
        assert grouping.counts[-1] == min(fewest_tokens)
        for count, tokens in fewest_tokens.items():
            cuts = grouping.cuts(count)
            assert len(cuts) == count + 1 and (cuts[0], cuts[-1]) == (0, len(sizes))
            mine = sum((b - a) * descending[a] for a, b in pairwise(cuts))
            assert tokens <= mine <= 1.01 * tokens


def exact_bins(sizes: list[int], capacity: int) -> int:
    best = len(sizes)

    def place(i: int, rooms: tuple[int, ...]) -> None:
        nonlocal best
        if len(rooms) >= best:
            return
        if i == len(sizes):
            best = len(rooms)
            return
        for b in range(len(rooms)):
            if rooms[b] >= sizes[i]:
                place(i + 1, tuple(sorted((*rooms[:b], rooms[b] - sizes[i], *rooms[b + 1 :]))))
        place(i + 1, tuple(sorted((*rooms, capacity - sizes[i]))))

    place(0, ())
    return best


def exact_groups(sizes: list[int], capacity: int) -> dict[int, int]:
    """The fewest tokens for every number of groups, over all ways to cut the sorted rows."""
    layers = [{0: 0}]  # groups so far -> rows so far -> tokens
    for _ in sizes:
        layer: dict[int, int] = {}
        for i, tokens in layers[-1].items():
            for j in range(i + 1, len(sizes) + 1):
                if j - i == 1 or (j - i) * sizes[i] <= capacity:
                    layer[j] = min(layer.get(j, 10**9), tokens + (j - i) * sizes[i])
        layers.append(layer)
    return {count: layer[len(sizes)] for count, layer in enumerate(layers) if len(sizes) in layer}
