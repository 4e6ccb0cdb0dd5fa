"""Schedulers of rollouts beside each other: the real Collector on simulated tools, in virtual time.

    OMP_NUM_THREADS=1 python benchmarks/rollouts.py schedule          # the table as markdown; about a minute

Same rollout slots (workers) and the same trajectories for all: an episode takes 5 to 50 steps (log-uniform), a
step as long as its tool, log-normal. `lengths` says whether the siblings of a group take as many steps as they like or
as many as each other. The trainer takes B trajectories and trains for `train` of the seconds that the workers need for
B trajectories when none is idle. Rates, idle time and ages are those after the first quarter of the batches.

    streaming   one rollout a prompt; who has ended is trained, nobody waits
    (a) barrier groups of 8; a batch is begun, waited for and trained, nothing runs over the update
    (b) hold    groups of 8; a slot is free again when all 8 have ended; batches of whole groups
    (c) refill  groups of 8; a slot is free again when its episode has ended; batches of whole groups
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nemo_flashrl.environments.environment import Message, StepResult
from nemo_flashrl.records import Generation, Sampling
from nemo_flashrl.rehearsal.warm_start import make_tokenizer
from nemo_flashrl.rollout.collector import Collector
from nemo_flashrl.rollout.episode import Limits
from nemo_flashrl.rollout.groups import SlotClock
from nemo_flashrl.rollout.metrics import AGES
from nemo_flashrl.rollout.prompts import PromptStream

GROUP, FEWEST, MOST = 8, 5, 50
FOREVER = 1e9
SCHEDULERS = ("streaming", "(a) barrier", "(b) hold", "(c) refill")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Nobody sleeps: when nothing is ready, the clock moves on to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self._now = max(self._now, self._scheduled[0]._when)
        super()._run_once()


@dataclass
class Workload:
    """Trajectories by number: how long each step of each takes, seconds."""

    steps: list[np.ndarray]

    @classmethod
    def draw(cls, count: int, sigma: float, lengths_of: str, seed: int) -> Workload:
        """`lengths_of` is "own" or "shared" by the group's siblings."""
        rng = np.random.default_rng(seed)
        lengths = np.rint(np.exp(rng.uniform(np.log(FEWEST), np.log(MOST), count))).astype(int)
        if lengths_of == "shared":
            lengths = np.repeat(lengths[: count // GROUP], GROUP)
        return cls([np.exp(rng.normal(0.0, sigma, length)) for length in lengths])

    @property
    def seconds(self) -> float:
        """Of one worker for all of them."""
        return float(sum(steps.sum() for steps in self.steps))


@dataclass
class Workers:
    """What the episodes of one run share: the work, the siblings that wait for each other, how many are busy."""

    workload: Workload
    group_size: int
    hold: bool
    clock: SlotClock
    busy: int = 0
    begun: dict[int, int] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    free: dict[int, asyncio.Event] = field(default_factory=dict)

    def count(self, change: int) -> None:
        self.busy += change
        self.clock.update(asyncio.get_running_loop().time(), running=self.busy, asked=True)


class Tool:
    """An environment that takes its time."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers

    async def reset(self, task: int) -> list[Message]:
        workers = self.workers
        self.task, self.sample = task, workers.begun.get(task, 0)
        workers.begun[task] = self.sample + 1
        number = task * workers.group_size + self.sample % workers.group_size
        self.left = list(workers.workload.steps[number])
        workers.count(+1)
        return [{"role": "user", "content": "Q"}]

    async def step(self, action: str) -> StepResult:
        await asyncio.sleep(self.left.pop())
        return StepResult(reward=1.0, done=not self.left)

    async def close(self) -> None:
        """With `hold` the slot is held until the siblings have ended."""
        workers = self.workers
        workers.count(-1)
        group = self.task, self.sample // workers.group_size
        workers.ended[group] = workers.ended.get(group, 0) + 1
        free = workers.free.setdefault(group, asyncio.Event())
        if workers.ended[group] == workers.group_size:
            free.set()
        if workers.hold:
            await free.wait()


class Instant:
    """An engine that answers at once, with the version that the trainer is at."""

    def __init__(self, token: int) -> None:
        self.version = 0
        self.token = token

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        return Generation((self.token,), (-0.5,), (self.version,), "stop")


@dataclass
class Outcome:
    """One scheduler on one workload."""

    trajectories_per_second: float
    idle: float  # share of the workers' time
    ages: dict[str, float]  # share of trajectories by age in policy versions
    oldest: float


async def run(scheduler: str, workload: Workload, batch_size: int, train: float) -> Outcome:
    """Train one epoch, every trajectory once, in virtual time."""
    count, group_size = len(workload.steps), 1 if scheduler == "streaming" else GROUP
    tokenizer, loop = make_tokenizer(), asyncio.get_running_loop()
    workers = Workers(workload, group_size, scheduler == "(b) hold", SlotClock(batch_size, loop.time()))
    engine = Instant(tokenizer.convert_tokens_to_ids(")"))
    collector = Collector(
        engine,
        lambda: Tool(workers),
        range(count // group_size),
        tokenizer,
        PromptStream(count // group_size),
        Limits(max_turns=MOST, step_timeout=FOREVER),
        Sampling(max_tokens=1),
        batch_size=batch_size,
        group_size=group_size,
        max_in_flight=batch_size,
        streaming=scheduler != "(a) barrier",
    )
    training = train * workload.seconds / count  # B trajectories on B workers
    batches, total = [], count // batch_size
    for version in range(total):
        if version == total // 4:
            workers.count(0)
            workers.clock.take()
            started, batches = loop.time(), []
        engine.version = version
        batches.append(await collector.collect(version))
        await asyncio.sleep(training)
    workers.count(0)
    elapsed, empty = loop.time() - started, workers.clock.take()["rollout_idle_seconds"]
    await collector.close()
    ages = {name: float(np.mean([b.metrics[f"staleness_{name}"] for b in batches])) for name, *_ in AGES}
    oldest = max(b.metrics["staleness_max"] for b in batches)
    return Outcome(len(batches) * batch_size / elapsed, empty / elapsed, ages, oldest)


def simulate(*arguments: Any) -> Outcome:
    """`run` on a clock of its own."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(run(*arguments))


def schedule(options: argparse.Namespace) -> None:
    """Print one row a scheduler and setting."""
    names = " / ".join(name.replace("_up", "+").replace("_", "-") for name, *_ in AGES)
    print(f"| sigma | lengths | scheduler | trajectories/s | streaming is | idle | age {names} | oldest |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for sigma, lengths in product(options.sigma, ("own", "shared")):
        workload = Workload.draw(options.batches * options.batch_size, sigma, lengths, options.seed)
        outcomes = {s: simulate(s, workload, options.batch_size, options.train) for s in SCHEDULERS}
        for scheduler, outcome in outcomes.items():
            ratio = outcomes["streaming"].trajectories_per_second / outcome.trajectories_per_second
            ages = " / ".join(f"{share:.0%}" for share in outcome.ages.values())
            print(
                f"| {sigma:g} | {lengths} | {scheduler} | {outcome.trajectories_per_second:.3f} | {ratio:.2f} x "
                f"| {outcome.idle:.1%} | {ages} | {outcome.oldest:.0f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    figure = commands.add_parser("schedule", help="streaming beside three group-synchronous schedulers")
    figure.add_argument("--batch-size", type=int, default=64, help="trajectories, and workers")
    figure.add_argument("--batches", type=int, default=16)
    figure.add_argument("--sigma", type=float, nargs="+", default=[1.0, 1.5], help="of a tool's log-latency")
    figure.add_argument("--train", type=float, default=0.25)
    figure.add_argument("--seed", type=int, default=0)
    figure.set_defaults(run=schedule)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
