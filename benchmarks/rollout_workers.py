"""What rollouts cost the trainer's process, played in it and by rollout workers, and how fast two workers are.

    OMP_NUM_THREADS=1 python benchmarks/rollout_workers.py            # three tables' rows; two minutes, two cores

Episodes and server are those of `rollout_load.py`: 20 turns, 7,000 tokens, 240 sampled tokens a turn, answers at once.
Trainer: CPU time of the trainer's process (user and system, all threads) for a trajectory that a batch holds. Beside:
how many small torch operations a second a thread of that process issues, as a trainer does between a GPU's kernels,
alone and beside full rollouts, and the longest time in which it issued none. The trainer's process is held to the first
core, server and workers to the second, so that they compete for Python's interpreter lock alone.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import rollout_load
from rollout_load import ACTION, TOKENS, TURNS

from nemo_flashrl.config.schema import RunConfig
from nemo_flashrl.engines.factory import make_remote
from nemo_flashrl.environments.environment import Message, StepResult
from nemo_flashrl.records import Sampling
from nemo_flashrl.rollout import from_config
from nemo_flashrl.rollout.collector import Collector
from nemo_flashrl.rollout.driver import RolloutDriver
from nemo_flashrl.rollout.episode import Limits

BATCH, SECONDS = 16, 10.0
FIRST, SECOND = {0}, {1}


@dataclass(frozen=True, slots=True)
class Settings:
    """Texts of the prompt and of each observation."""

    prompt: str
    observation: str


class Chat:
    """`rollout_load.Tool` as an environment that a configuration can name."""

    Settings = Settings

    def __init__(self, settings: Settings) -> None:
        self._tool = rollout_load.Tool(settings.prompt, settings.observation, TURNS, [])

    @staticmethod
    def tasks(settings: Settings) -> Sequence[int]:
        return range(1000)

    async def reset(self, task: int) -> list[Message]:
        return await self._tool.reset(task)

    async def step(self, action: str) -> StepResult:
        return await self._tool.step(action)

    async def close(self) -> None:
        await self._tool.close()


def configured(url: str, tokenizer: Any, workers: int) -> RunConfig:
    observed = (TOKENS - TURNS * ACTION) // TURNS
    texts = [rollout_load.text_of(tokenizer, count) for count in (observed, observed - 20)]
    config = RunConfig()
    config.model.context_length, config.batching.context_margin = 2 * TOKENS, 0.0
    config.environment.name = "rollout_workers.Chat"
    config.environment.settings = dict(zip(("prompt", "observation"), texts, strict=True))
    config.rollout.engine, config.rollout.servers, config.rollout.workers = "vllm", [url], workers or None
    config.rollout.max_turns, config.rollout.max_tokens_per_turn = TURNS, ACTION
    return config


def driver(url: str, tokenizer: Any, workers: int) -> RolloutDriver:
    """Streaming rollouts; with 0 workers they are played in this process."""
    config = configured(url, tokenizer, workers)
    sampling = Sampling(max_tokens=ACTION, stop_token_ids=(tokenizer.eos_token_id,))
    if workers:
        engine = from_config.start_workers(config, tokenizer, len(tokenizer))
        play, limits = engine.play, Limits()
    else:
        engine, play = make_remote(config.rollout, len(tokenizer), 2 * TOKENS), None
        limits = from_config.episode_limits(config)
    settings = Settings(**config.environment.settings)
    parts = (engine, lambda: Chat(settings), Chat.tasks(settings), tokenizer, None, limits, sampling)
    return RolloutDriver(engine, Collector(*parts, batch_size=BATCH, streaming=True, play=play))


def operations(seconds: float) -> tuple[float, float]:
    """Small torch operations a second, and the longest pause between two of them in seconds."""
    small, done, longest = torch.zeros(8), 0, 0.0
    last = started = time.perf_counter()
    while last - started < seconds:
        small.add_(1.0)
        now = time.perf_counter()
        longest, last, done = max(longest, now - last), now, done + 1
    return done / seconds, longest


def beside(rollouts: RolloutDriver, seconds: float) -> tuple[float, float, float]:
    """`operations` while batch after batch is collected and thrown away, and turns a second meanwhile."""
    stop, batches = threading.Event(), []

    def collect() -> None:
        while not stop.is_set():
            rollouts.collect(0)
            rollouts.trained()
            batches.append(time.perf_counter())

    thread = threading.Thread(target=collect)
    thread.start()
    while len(batches) < 2:
        time.sleep(0.1)
    first, begun = len(batches), time.perf_counter()
    rate, pause = operations(seconds)
    turns = (len(batches) - first) * BATCH * TURNS / (time.perf_counter() - begun)
    stop.set()
    thread.join()
    return rate, pause, turns


def trainer_cost(rollouts: RolloutDriver, batches: int) -> tuple[float, float]:
    """CPU seconds of this process for a trajectory, and turns a second."""
    rollouts.collect(0)
    rollouts.trained()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(batches):
        rollouts.collect(0)
        rollouts.trained()
    count = batches * BATCH
    return (time.process_time() - cpu) / count, count * TURNS / (time.perf_counter() - wall)


async def run(options: argparse.Namespace) -> None:
    """Print a row for the trainer's process alone, then for 0, 1 and 2 workers."""
    from real_models import qwen

    tokenizer = qwen()
    os.sched_setaffinity(0, SECOND)
    async with rollout_load.serving(tokenizer) as url:
        print("workers  trainer's CPU a trajectory   turns/s   torch operations/s beside   longest pause")
        os.sched_setaffinity(0, FIRST)
        alone, pause = operations(options.seconds)
        print(f"alone{'':47}{alone:12,.0f}{'':12}{1e3 * pause:8.1f} ms", flush=True)
        for workers in (0, 1, 2):
            os.sched_setaffinity(0, SECOND if workers else FIRST)  # of what starts now
            rollouts = driver(url, tokenizer, workers)
            os.sched_setaffinity(0, FIRST)
            os.sched_setaffinity(rollouts._thread.native_id, FIRST)
            cost, turns = await asyncio.to_thread(trainer_cost, rollouts, options.batches)
            rate, pause, _ = await asyncio.to_thread(beside, rollouts, options.seconds)
            share = f"{rate:12,.0f} ({rate / alone:4.0%})"
            print(f"{workers:4}{1e3 * cost:20.2f} ms{turns:18.0f}{'':7}{share}{1e3 * pause:13.1f} ms", flush=True)
            await asyncio.to_thread(rollouts.close)
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--batches", type=int, default=6)
    asyncio.run(run(parser.parse_args()))
