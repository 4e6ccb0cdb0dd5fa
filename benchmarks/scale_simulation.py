"""Asynchronous rollouts against trainer steps: a discrete simulation by the ends of episodes, for scale.py."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

SIGMA = 0.6  # of the logarithm of a trajectory's length


@dataclass(frozen=True)
class Rollouts:
    """How episodes go: `in_flight` at a time, each decoding `rate` tokens a second."""

    in_flight: int
    rate: float
    mean_tokens: int
    context: int
    action_share: float
    turns: int
    tool_seconds: float  # of a turn, exponential

    def episode(self, rng: random.Random) -> float:
        """Seconds of one: decoding, and the tools' time."""
        tokens = min(self.context, rng.lognormvariate(math.log(self.mean_tokens) - SIGMA**2 / 2, SIGMA))
        return tokens * self.action_share / self.rate + rng.gammavariate(self.turns, self.tool_seconds)


@dataclass(frozen=True)
class Simulated:
    """What the steps of a simulation came to."""

    seconds: float  # a step, waiting and refit included
    waiting: float  # share of it that the trainer waits for a batch
    dropped: float  # share of finished trajectories that were too old
    staleness: float  # mean, policy versions


def simulate(
    rollouts: Rollouts, *, batch: int, train: float, refit: float, max_staleness: int, steps: int = 60, seed: int = 0
) -> Simulated:
    """`steps` steps of `train` seconds, each followed by a refit during which sampling pauses.

    Who ends waits in line, and no episode starts while two batches wait there. The trainer takes the oldest batch; what
    started more than `max_staleness` versions ago is dropped.
    """
    rng = random.Random(seed)
    now = paused = free_at = waited = 0.0
    version = dropped = 0
    ages: list[int] = []
    running: list[tuple[float, int]] = []  # (end if sampling had never paused, version at the start)
    line: deque[int] = deque()
    while version < steps:
        while len(running) < rollouts.in_flight and len(line) < 2 * batch:
            heapq.heappush(running, (now - paused + rollouts.episode(rng), version))
        if len(line) >= batch and now >= free_at:
            waited += now - free_at
            ages += [version - line.popleft() for _ in range(batch)]
            free_at = now + train + refit
            version += 1
            paused += refit
            fresh = deque(started for started in line if version - started <= max_staleness)
            dropped, line = dropped + len(line) - len(fresh), fresh
        elif len(line) >= batch and (not running or running[0][0] + paused > free_at):
            now = free_at
        else:
            end, started = heapq.heappop(running)
            now = max(now, end + paused)
            if version - started <= max_staleness:
                line.append(started)
            else:
                dropped += 1
    return Simulated(now / version, waited / now, dropped / (dropped + len(ages)), sum(ages) / len(ages))


def fewest_in_flight(rollouts: Callable[[int], Rollouts], most: int, **sizes: float) -> tuple[int, Simulated]:
    """The number in flight, up to `most`, with the shortest step; of steps within 2% of it, the smallest number."""
    batch = int(sizes["batch"])
    tried = {n: simulate(rollouts(n), **sizes) for n in {min(most, round(f * batch)) for f in (1, 1.5, 2, 3, 4, 6)}}
    least = min(run.seconds for run in tried.values())
    number = min(n for n, run in tried.items() if run.seconds <= 1.02 * least)
    return number, tried[number]
