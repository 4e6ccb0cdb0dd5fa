"""Microbatch plans of LengthBatcher beside those of other planners, on made-up agent lengths; every seed is fixed.

    OMP_NUM_THREADS=1 python benchmarks/batching.py                   # every table below as markdown; about 3 minutes
    python benchmarks/batching.py --layout packed --budget 32768      # a part
    python benchmarks/batching.py --seeds 10                          # the summary over more batches

Lengths: `log-normal` has a median of 6k and sigma 1, cut at 32k, where generation stops; `bimodal` is 80% around 1k and
20% around 24k, each +-10%; `bimodal-exact` the same without the 10%; `uniform` is 512..32768. B trajectories are spread
over DP ranks.

Budgets: 32768 tokens holds the longest trajectory once, the least a user can set; 65536 twice, what verl's guide
recommends. Lengths are rounded up to 8, as sequence parallelism over 8 ranks needs. A trajectory of S tokens costs S +
1.75e-5 S^2, the FLOPs of an 8B model with 32 layers; padded rows cost what their padded length does.

Planners, all of them within the budget and with equal numbers of microbatches on all ranks:
    naive     arrival order: equal contiguous shares, a microbatch is closed when the next trajectory does not fit
    greedy    sorted, longest first: each to the cheapest rank, there first-fit (packed) or into runs (padded)
    kk        Karmarkar-Karp differencing by cost over the ranks, then by tokens over a rank's microbatches, whose
    number is
              raised until all fit
    kk-equal  the same with equally many trajectories on each rank, as verl balances a batch
"""

from __future__ import annotations

import argparse
import heapq
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nemo_flashrl.data.length_batcher import BatchingSettings, LengthBatcher  # noqa: E402

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
    count = max(len(rank) for rank in ranks)
    return [rank + [[] for _ in range(count - len(rank))] for rank in ranks]


def ours(batch: Batch) -> Groups:
    return plan(batch).ranks


def plan(batch: Batch):  # noqa: ANN201
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
    "ours": ours,
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
        f"{name}: {field} {getattr(peer, field)} against {getattr(mine, field)}"
        for name, peer in peers.items()
        for field in ("microbatches", "padding", "imbalance")
        if getattr(peer, field) < getattr(mine, field)
    ]


def cells(layouts: list[str], budgets: list[int], seed: int):
    for layout in layouts:
        for budget in budgets:
            for distribution in DISTRIBUTIONS:
                for count in (64, 256):
                    for ranks in (1, 4, 8):
                        batch = Batch(make_lengths(distribution, count, seed), ranks, budget, layout)
                        yield distribution, batch, plan(batch).lower_bound * ranks


def print_tables(layouts: list[str], budgets: list[int]) -> None:
    notes, shown = [], None
    for distribution, batch, bound in cells(layouts, budgets, seed=0):
        scores = {name: score(batch, planner(batch)) for name, planner in PLANNERS.items()}
        mine, peers = scores["ours"], {name: s for name, s in scores.items() if name != "ours"}
        if shown != (batch.layout, batch.budget):
            shown = (batch.layout, batch.budget)
            print(f"\n### {batch.layout}, {batch.budget} tokens a microbatch\n")
            print("| lengths | B | DP | bound | use at bound |", " | ".join(PLANNERS), "|")
            print("| --- " * (5 + len(PLANNERS)) + "|")
        possible = 100 * batch.sizes.sum() / (bound * batch.budget)
        shares = [
            f"{s.microbatches} · {s.padding:.2f} · {s.use:.1f} · {s.imbalance:.2f} · {s.step:.3f}"
            for s in scores.values()
        ]
        print(
            f"| {distribution} | {len(batch.lengths)} | {batch.ranks} | {bound} | {possible:.1f} |",
            " | ".join(shares),
            "|",
        )
        where = f"{batch.layout} {batch.budget}, {distribution}, B={len(batch.lengths)}, DP={batch.ranks}"
        notes += [f"- {where}: misses the bar for {what}" for what in missed_bars(batch, mine, bound)]
        notes += [f"- {where}: {what}" for what in better_peers(mine, peers)]
    print("\n### Cells where a bar is missed or a peer is ahead in a column\n")
    print("\n".join(notes) or "None.")


def print_summary(layouts: list[str], budgets: list[int], num_seeds: int) -> None:
    print(f"\n### Over seeds 0..{num_seeds - 1}: our worst batch of each kind\n")
    print("| layout | budget | B | plans | at the bound | above 1.02 bound | worst padding % | worst imbalance % |")
    print("| --- " * 8 + "|")
    rows: dict[tuple, list[tuple[Score, int]]] = {}
    for seed in range(num_seeds):
        for _, batch, bound in cells(layouts, budgets, seed):
            key = (batch.layout, batch.budget, len(batch.lengths))
            rows.setdefault(key, []).append((score(batch, ours(batch)), bound))
    for key, results in rows.items():
        at = sum(s.microbatches == bound for s, bound in results)
        above = sum(s.microbatches > 1.02 * bound for s, bound in results)
        worst = [max(getattr(s, field) for s, _ in results) for field in ("padding", "imbalance")]
        print("|", " | ".join(map(str, (*key, len(results), at, above, *worst))), "|")


def print_times(layouts: list[str], budgets: list[int]) -> None:
    print("\n### Planning time for B = 1024, milliseconds, best of 5\n")
    print("| layout | budget | DP |", " | ".join(DISTRIBUTIONS), "|")
    print("| --- " * (3 + len(DISTRIBUTIONS)) + "|")
    for layout in layouts:
        for budget in budgets:
            for ranks in (1, 8, 64):
                times = []
                for distribution in DISTRIBUTIONS:
                    batch = Batch(make_lengths(distribution, 1024, 0), ranks, budget, layout)
                    runs = []
                    for _ in range(5):
                        started = time.perf_counter()
                        plan(batch)
                        runs.append(1e3 * (time.perf_counter() - started))
                    times.append(f"{min(runs):.0f}")
                print(f"| {layout} | {budget} | {ranks} |", " | ".join(times), "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=("packed", "padded"), help="one layout only")
    parser.add_argument("--budget", type=int, choices=BUDGETS, help="one budget only")
    parser.add_argument("--seeds", type=int, default=5, help="batches of each kind in the summary")
    arguments = parser.parse_args()
    layouts = [arguments.layout] if arguments.layout else ["packed", "padded"]
    budgets = [arguments.budget] if arguments.budget else list(BUDGETS)
    print_tables(layouts, budgets)
    print_summary(layouts, budgets, arguments.seeds)
    print_times(layouts, budgets)


if __name__ == "__main__":
    main()
