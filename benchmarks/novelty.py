"""What `length_penalty.novelty` costs a trajectory, and for how long it keeps an event loop waiting.

    python benchmarks/novelty.py                             # all of it, a minute of a core
    python benchmarks/novelty.py --folder /models/MiniLM     # an embedder of your own in place of the random one

Trajectories of 8,192 action tokens in 8 turns: sentences of 8 to 20 made-up words, one in three of them said before in
another order, and the byte pairs of the rehearsals' small tokenizer. The embedder is a random BERT of the sizes of
all-MiniLM-L6-v2 (6 layers of 384, 22M parameters): its time is that of a trained one.

    ms          of one trajectory, median, alone in its process, and of CPU time over all its threads; the first one
                apart, while token pieces are not cached
    pause       the longest that an event loop which should wake every 2 ms is late while trajectories are measured in
                the thread, and the 99th percentile; for comparison a thread that sleeps, and a plain Python loop in it
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_flashrl.metrics.novelty import FolderEmbedder, Novelty
from nemo_flashrl.metrics.repetition import new_tokens
from nemo_flashrl.records import Trajectory
from nemo_flashrl.rehearsal.small import small_tokenizer

TOKENS, TURNS, TRAJECTORIES = 8192, 8, 6
SECONDS_BETWEEN = 0.002  # of the event loop that is watched


def trajectory(tokenizer: Any, seed: int) -> Trajectory:
    """TOKENS action tokens in TURNS turns with one token of observation between two."""
    rng = np.random.default_rng(seed)
    letters = list("abcdefghijklmnopqrstuvwxyz")
    words = ["".join(rng.choice(letters, rng.integers(2, 10))) for _ in range(3000)]
    told: list[list[str]] = []
    ids: list[int] = []
    while len(ids) < TOKENS:
        chosen = (
            told[rng.integers(len(told))]
            if told and rng.random() < 1 / 3
            else list(rng.choice(words, rng.integers(8, 20)))
        )
        told.append(chosen)
        ids += tokenizer.encode(f"{' '.join(rng.permutation(chosen)).capitalize()}. ", add_special_tokens=False)
    own = TOKENS // TURNS
    owner = np.concatenate([np.r_[np.full(own, turn), -1] for turn in range(TURNS)])
    tokens = np.zeros(len(owner), dtype=np.int64)
    tokens[owner >= 0] = ids[:TOKENS]
    return Trajectory(
        0,
        0,
        tokens,
        owner >= 0,
        np.zeros(len(owner)),
        np.zeros(len(owner)),
        0.0,
        TURNS,
        "done",
        True,
        turn_of_token=owner,
    )


def random_embedder(folder: Path, tokenizer: Any) -> str:
    """A checkpoint of all-MiniLM-L6-v2's sizes with random weights."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    BertModel(BertConfig(**sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


async def longest_pauses(measure: Callable[[Trajectory], Any], given: list[Trajectory]) -> list[float]:
    """How late each wake-up was, seconds, while every trajectory is measured."""
    late: list[float] = []

    async def watch() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(SECONDS_BETWEEN)
            late.append(time.perf_counter() - began - SECONDS_BETWEEN)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0.05)
    late.clear()
    await asyncio.gather(*(measure(one) for one in given))
    watching.cancel()
    return late


async def ngrams(one: Trajectory) -> int:
    return await asyncio.to_thread(new_tokens, one)


async def nothing(_: Trajectory) -> None:
    await asyncio.to_thread(time.sleep, 0.1)


def spin(_: Trajectory) -> int:
    """20 ms of CPU time in plain Python."""
    began = time.thread_time()
    while time.thread_time() - began < 0.02:
        pass
    return TOKENS


async def spinning(one: Trajectory) -> int:
    return await asyncio.to_thread(spin, one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="a Hugging Face folder to embed with")
    folder = parser.parse_args().folder
    tokenizer = small_tokenizer(TOKENS)
    given = [trajectory(tokenizer, seed) for seed in range(TRAJECTORIES)]
    count = sum(tokenizer.decode(one.token_ids[one.action_mask].tolist()).count(". ") for one in given) // TRAJECTORIES
    print(f"{torch.get_num_threads()} threads; {TRAJECTORIES} trajectories of {TOKENS} tokens, {count} sentences each")
    print("| novelty | first, ms | ms | CPU ms | new tokens | pause, longest, ms | 99%, ms |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as made:
        embedder = FolderEmbedder(folder or random_embedder(Path(made), tokenizer))
    by_words, by_vectors = Novelty(tokenizer), Novelty(tokenizer, embedder)
    for name, measure, thread in (
        ("(sleep)", lambda _: TOKENS, nothing),
        ("(Python loop)", spin, spinning),
        ("ngrams", new_tokens, ngrams),
        ("sentences", lambda one: new_tokens(by_words.measured(one)), by_words),
        ("embedder", lambda one: new_tokens(by_vectors.measured(one)), by_vectors),
    ):
        times, cpu, counts = [], [], []
        for one in given:
            began, spent = time.perf_counter(), time.process_time()
            counts.append(measure(one))
            times.append(1e3 * (time.perf_counter() - began))
            cpu.append(1e3 * (time.process_time() - spent))
        late = 1e3 * np.array(asyncio.run(longest_pauses(thread, given)))
        print(
            f"| {name} | {times[0]:.1f} | {statistics.median(times[1:]):.1f} | {statistics.median(cpu[1:]):.1f} "
            f"| {statistics.fmean(counts):.0f} | {late.max():.1f} | {np.quantile(late, 0.99):.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
