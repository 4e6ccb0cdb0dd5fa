"""Microbatch plans of LengthBatcher beside those of other planners, on made-up agent lengths; every seed is fixed.

    OMP_NUM_THREADS=1 python benchmarks/batching.py                   # every table as markdown; about a minute

Lengths: `log-normal` has a median of 6k and sigma 1, cut at 32k, where generation stops; `bimodal` is 80% around 1k and
20% around 24k, each +-10%; `bimodal-exact` the same without the 10%; `uniform` is 512..32768. Budgets: 32768 tokens
hold the longest trajectory once, the least that makes sense; 65536 twice. Lengths are rounded up to 8, as sequence
parallelism over 8 ranks needs. A trajectory of S tokens costs S + 1.75e-5 S^2, the FLOPs of an 8B model with 32 layers;
a padded row costs what its padded length does.

Planners, all of them within the budget and with equal numbers of microbatches on all ranks:
    naive     arrival order: equal contiguous shares, a microbatch is closed when the next trajectory does not fit
    greedy    sorted, longest first: each to the cheapest rank, there first-fit (packed) or into runs (padded)
    kk        Karmarkar-Karp differencing: by cost over ranks, then by tokens over microbatches, as few as fit
    kk-equal  the same with equally many trajectories on each rank, as verl balances a batch
"""

from __future__ import annotations

import argparse
import heapq
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from timeit import repeat
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nemo_flashrl.batching.arrangement import least_costliest_rank
from nemo_flashrl.batching.planner import LAYOUTS, BatchingSettings, LengthBatcher, Plan

MULTIPLE, LONGEST, QUADRATIC = 8, 32768, 1.75e-5
BUDGETS = (LONGEST, 2 * LONGEST)
DISTRIBUTIONS = ("log-normal", "bimodal", "bimodal-exact", "uniform")
Groups = list[list[list[int]]]  # [rank][microbatch] of places in the batch


def make_lengths(distribution: str, count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if distribution == "log-normal":
        return np.minimum(np.exp(rng.normal(np.log(6000), 1.0, count)), LONGEST).astype(np.int64)
    if distribution == "uniform":
        return rng.integers(512, LONGEST + 1, count)
    lengths = np.where(rng.random(count) < 0.2, 24000, 1000)
    spread = 0.1 if distribution == "bimodal" else 0.0
    return (lengths * rng.uniform(1 - spread, 1 + spread, count)).astype(np.int64)


class Batch(NamedTuple):
    """What a planner sees."""

    lengths: np.ndarray  # int64 [B]
    ranks: int
    budget: int
    layout: str

    @property
    def sizes(self) -> np.ndarray:
        return -(-self.lengths // MULTIPLE) * MULTIPLE

    @property
    def costs(self) -> np.ndarray:
        return self.sizes * (1 + QUADRATIC * self.sizes)

    def tokens(self, group: list[int]) -> int:
        """What a microbatch runs."""
        sizes = self.sizes[group]
        return int(sizes.sum() if self.layout == "packed" else len(sizes) * sizes.max(initial=0))

    def cost(self, group: list[int]) -> float:
        if self.layout == "packed":
            return float(self.costs[group].sum())
        longest = int(self.sizes[group].max(initial=0))
        return len(group) * longest * (1 + QUADRATIC * longest)


def equal_counts(ranks: Groups) -> Groups:
    return [rank + [[] for _ in range(max(map(len, ranks)) - len(rank))] for rank in ranks]


def plan(batch: Batch) -> Plan:
    settings = BatchingSettings(batch.budget, 2 * LONGEST, batch.layout, MULTIPLE, quadratic_cost=QUADRATIC)
    return LengthBatcher(settings).plan(batch.lengths, batch.ranks)


def naive(batch: Batch) -> Groups:
    ranks = []
    for share in np.array_split(np.arange(len(batch.lengths)), batch.ranks):
        groups: list[list[int]] = [[]]
        for i in share.tolist():
            if groups[-1] and batch.tokens([*groups[-1], i]) > batch.budget:
                groups.append([])
            groups[-1].append(i)
        ranks.append(groups)
    return equal_counts(ranks)


def greedy(batch: Batch) -> Groups:
    dealt: list[list[int]] = [[] for _ in range(batch.ranks)]
    rank_costs = np.zeros(batch.ranks)
    for i in np.argsort(-batch.sizes, kind="stable").tolist():
        rank = int(rank_costs.argmin())
        dealt[rank].append(i)
        rank_costs[rank] += batch.costs[i]
    ranks = []
    for share in dealt:
        groups: list[list[int]] = []
        for i in share:
            open_groups = groups if batch.layout == "packed" else groups[-1:]
            fitting = next((g for g in open_groups if batch.tokens([*g, i]) <= batch.budget), None)
            if fitting is None:
                groups.append([i])
            else:
                fitting.append(i)
        ranks.append(groups)
    return equal_counts(ranks)


def karmarkar_karp(weights: np.ndarray, parts: int, equal_size: bool = False) -> list[list[int]]:
    """Partition into `parts` of nearly equal sums by the largest differencing method.

    A partial solution is a tuple of sums. The two with the widest spread are merged, the largest sum of one with the
    smallest of the other, until one is left. With `equal_size` the first solutions hold `parts` numbers each instead of
    one.
    """
    order = np.argsort(weights, kind="stable").tolist()
    if equal_size and len(order) % parts == 0:
        blocks = [order[i : i + parts] for i in range(0, len(order), parts)]
    else:
        blocks = [[i] for i in order]
    heap = []
    for number, block in enumerate(blocks):
        solution = sorted(((float(weights[i]), [i]) for i in block), reverse=True)
        solution += [(0.0, [])] * (parts - len(solution))
        heap.append((solution[-1][0] - solution[0][0], number, solution))
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap), heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(first[2], reversed(second[2]), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], first[1], merged))
    return [members for _, members in heap[0][2]]


def kk(batch: Batch, equal_size: bool = False) -> Groups:
    shares = karmarkar_karp(batch.costs, batch.ranks, equal_size)
    count = max(-(-int(batch.sizes[share].sum()) // batch.budget) for share in shares)
    ranks: Groups = []
    while len(ranks) < batch.ranks:  # a rank that does not fit starts all of them again with one microbatch more
        share = shares[len(ranks)]
        parts = karmarkar_karp(batch.sizes[share].astype(float), count)
        groups = [[share[i] for i in part] for part in parts]
        if all(batch.tokens(g) <= batch.budget for g in groups):
            ranks.append(groups)
        else:
            ranks, count = [], count + 1
    return ranks


PLANNERS: dict[str, Callable[[Batch], Groups]] = {
    "ours": lambda batch: plan(batch).ranks,
    "naive": naive,
    "greedy": greedy,
    "kk": kk,
    "kk-equal": lambda batch: kk(batch, equal_size=True),
}


class Score(NamedTuple):
    """Shares are in percent, rounded to the 0.01 that is shown and compared."""

    microbatches: int  # of all ranks
    padding: float
    use: float
    imbalance: float
    step: float  # the costliest rank / (cost of all trajectories unpadded / ranks)
    uneven: float  # the costliest microbatch / the mean - 1

    def __str__(self) -> str:
        shares = f"{self.padding:.2f} · {self.use:.1f} · {self.imbalance:.2f}"
        return f"{self.microbatches} · {shares} · {self.step:.3f} · {self.uneven:.0f}"


def score(batch: Batch, ranks: Groups) -> Score:
    assert sorted(i for rank in ranks for g in rank for i in g) == list(range(len(batch.lengths)))
    assert len({len(rank) for rank in ranks}) == 1
    tokens = np.array([[batch.tokens(list(g)) for g in rank] for rank in ranks])
    assert tokens.max() <= batch.budget
    costs = np.array([[batch.cost(list(g)) for g in rank] for rank in ranks])
    rank_costs = costs.sum(axis=1)
    return Score(
        tokens.size,
        round(100 * (1 - batch.lengths.sum() / np.maximum(tokens, MULTIPLE).sum()), 2),
        round(100 * tokens.sum() / (tokens.size * batch.budget), 2),
        round(100 * (rank_costs.max() / rank_costs.mean() - 1), 2),
        round(rank_costs.max() / (batch.costs.sum() / batch.ranks), 3),
        round(100 * (costs.max() / costs.mean() - 1), 1),
    )


def missed_bars(batch: Batch, mine: Score, bound: int) -> list[str]:
    """Bars that our plan misses; using the budget less than 97% is a miss only if a plan could use it more."""
    missed = []
    if mine.padding > (0.5 if batch.layout == "packed" else 5.0):
        missed.append("padding")
    if batch.layout == "packed" and mine.use < 97 and mine.microbatches > bound:
        missed.append("use")
    if len(batch.lengths) >= 256 and mine.imbalance > 3:
        missed.append("imbalance")
    if mine.microbatches > 1.02 * bound:
        missed.append("microbatches")
    return missed


def better_peers(mine: Score, peers: dict[str, Score]) -> list[str]:
    """Where a peer's plan has fewer microbatches, less padding or less imbalance than ours."""
    return [
        f"{name}: {field} {getattr(peer, field)} against {getattr(mine, field)}, "
        f"with {peer.microbatches} microbatches against {mine.microbatches}"
        for name, peer in peers.items()
        for field in ("microbatches", "padding", "imbalance")
        if getattr(peer, field) < getattr(mine, field)
    ]


def cells(seed: int) -> Iterator[tuple[str, Batch, int]]:
    for layout, budget, distribution, count, ranks in product(LAYOUTS, BUDGETS, DISTRIBUTIONS, (64, 256), (1, 4, 8)):
        batch = Batch(make_lengths(distribution, count, seed), ranks, budget, layout)
        yield distribution, batch, plan(batch).lower_bound * ranks


def print_tables() -> None:
    notes, shown = [], None
    for distribution, batch, bound in cells(seed=0):
        scores = {name: score(batch, planner(batch)) for name, planner in PLANNERS.items()}
        mine, peers = scores["ours"], {name: s for name, s in scores.items() if name != "ours"}
        if shown != (batch.layout, batch.budget):
            shown = (batch.layout, batch.budget)
            print(f"\n### {batch.layout}, {batch.budget} tokens a microbatch\n")
            print("| lengths | B | DP | bound | use at bound |", " | ".join(PLANNERS), "|")
            print("| --- " * (5 + len(PLANNERS)) + "|")
        possible = 100 * batch.sizes.sum() / (bound * batch.budget)
        row = [distribution, len(batch.lengths), batch.ranks, bound, f"{possible:.1f}", *map(str, scores.values())]
        print("|", " | ".join(map(str, row)), "|")
        where = f"- {batch.layout} {batch.budget}, {distribution}, B={len(batch.lengths)}, DP={batch.ranks}: "
        notes += [f"{where}misses the bar for {what}" for what in missed_bars(batch, mine, bound)]
        notes += [where + what for what in better_peers(mine, peers)]
    print("\n### Cells where a bar is missed or a peer is ahead in a column\n")
    print("\n".join(notes) or "None.")


def print_summary(num_seeds: int) -> None:
    print(f"\n### Over seeds 0..{num_seeds - 1}: our worst batch of each kind\n")
    worst = "worst padding % | worst imbalance % | worst step / bound"
    print(f"| layout | budget | B | plans | at the bound | above 1.02 bound | {worst} |")
    print("| --- " * 9 + "|")
    rows: dict[tuple, list[tuple[Score, int, float]]] = {}
    for seed in range(num_seeds):
        for _, batch, bound in cells(seed):
            key = (batch.layout, batch.budget, len(batch.lengths))
            mine, costs = score(batch, plan(batch).ranks), np.sort(batch.costs)[::-1]
            least = least_costliest_rank(costs, batch.ranks) * batch.ranks / costs.sum()
            rows.setdefault(key, []).append((mine, bound, mine.step / least))
    for key, results in rows.items():
        at = sum(s.microbatches == bound for s, bound, _ in results)
        above = sum(s.microbatches > 1.02 * bound for s, bound, _ in results)
        worst = [max(getattr(s, field) for s, _, _ in results) for field in ("padding", "imbalance")]
        numbers = (*key, len(results), at, above, *worst, f"{max(step for _, _, step in results):.3f}")
        print("|", " | ".join(map(str, numbers)), "|")


def print_times() -> None:
    print("\n### Planning time for B = 1024, milliseconds of one core, best of 10\n")
    print("| layout | budget | DP |", " | ".join(DISTRIBUTIONS), "|")
    print("| --- " * (3 + len(DISTRIBUTIONS)) + "|")
    for layout, budget, ranks in product(LAYOUTS, BUDGETS, (1, 8, 64)):
        batches = [Batch(make_lengths(distribution, 1024, 0), ranks, budget, layout) for distribution in DISTRIBUTIONS]
        times = [min(repeat(partial(plan, batch), timer=time.process_time, number=1, repeat=10)) for batch in batches]
        print(f"| {layout} | {budget} | {ranks} |", " | ".join(f"{1e3 * best:.0f}" for best in times), "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="batches of each kind in the summary")
    arguments = parser.parse_args()
    print_tables()
    print_summary(arguments.seeds)
    print_times()


if __name__ == "__main__":
    main()
