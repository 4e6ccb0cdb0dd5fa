"""CPU that rollouts cost their client: real chat template and tokenizer, and a server that answers at once.

    OMP_NUM_THREADS=1 python benchmarks/rollout_load.py turns     # a turn of an episode, by the length of its context
    OMP_NUM_THREADS=1 python benchmarks/rollout_load.py answer    # one answer of 8,192 tokens
    OMP_NUM_THREADS=1 python benchmarks/rollout_load.py profile   # where the time of a turn goes, by function

The server is a process of its own that speaks as vLLM 0.32 does, and has its answers ready. What is measured is this
process's CPU time, user and system: the median of some rounds, and the least. A busy core beside it makes both larger.
Needs `make models` for Qwen's tokenizer.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import functools
import gc
import json
import os
import pstats
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from aiohttp import web
from stand_in_server import Server, app

from nemo_flashrl.engines import VLLMEngine
from nemo_flashrl.environments.environment import Message, StepResult
from nemo_flashrl.records import Sampling
from nemo_flashrl.rollout.chat_tokens import Codec
from nemo_flashrl.rollout.episode import Limits, run_episode

ACTION, TURNS, TOKENS = 240, 20, 7000  # sampled tokens a turn, turns and tokens of an episode
LONG = 8192  # tokens of a long answer
NEAR, FAR = 2048, 32768  # tokens of context between which the growth of a turn's cost is told
VARIANTS = 16
TEXT = (
    "The file has 212 lines; lines 40 to 58 read the header and then the table of offsets. I think the error is in "
    "the second loop: it takes `offset + 1` where the format says that counting begins at 0. Let me check it:\n\n"
    "```python\nwith open(path, 'rb') as file:\n    header = file.read(64)\n    offsets = [int(x) for x in file]\n```\n"
)


class ReadyServer(Server):
    """Answers of some lengths, made once; short requests, those of the engine's checks, as the stand-in answers."""

    def __init__(self, answers: dict[int, list[bytes]]) -> None:
        super().__init__()
        self.answers = answers
        self.asked, self.act["context"] = 0, 4 * FAR

    async def generate(self, request: web.Request) -> web.Response:
        """One of the answers of as many tokens as may be sampled, or of the longest that fits."""
        body = await request.read()
        most = int(re.search(rb'"max_tokens": ?(\d+)', body)[1])
        if most < min(self.answers):
            return await super().generate(request)
        ready = self.answers[max(count for count in self.answers if count <= most)]
        self.asked += 1
        return web.Response(body=ready[self.asked % len(ready)], content_type="application/json")


def answer(token_ids: list[int], rng: np.random.Generator) -> bytes:
    """As vLLM 0.32 writes it for `logprobs: 0`, fields that are null included."""
    logprobs = (-rng.exponential(0.7, len(token_ids))).astype(np.float32).tolist()
    rows = [{"token_id": t, "logprob": x, "rank": 1} for t, x in zip(token_ids, logprobs, strict=True)]
    choice = {
        **{"index": 0, "finish_reason": "stop", "stop_reason": token_ids[-1], "token_ids": token_ids},
        **{"routed_experts": None, "sampling_mask": None},
        "weight_versions": [{"version": "default", "start": 0, "end": len(token_ids)}],
        "logprobs": {"content": [{**row, "top_logprobs": [row]} for row in rows]},
    }
    nulls = ("prompt_logprobs", "prompt_token_id_logprobs", "prompt_token_ids", "mm_placeholders", "metrics")
    whole = {
        **{"request_id": "f" * 32, "model": "policy", "created": 1764600000, "usage": {"total_tokens": 4096}},
        **dict.fromkeys((*nulls, "kv_transfer_params", "ec_transfer_params")),
        **{"output_mode": "tokens", "choices": [choice]},
    }
    return json.dumps(whole, ensure_ascii=False, separators=(",", ":")).encode()


def serve(port: int, words: list[int], end: int) -> None:
    """Answers of `words` in another order each, closed by `end`."""
    rng = np.random.default_rng(0)
    many = words * (1 + LONG // len(words))
    ready = {
        count: [answer([*many[n : n + count - 1], end], rng) for n in range(variants)]
        for count, variants in ((ACTION, VARIANTS), (LONG, 2))
    }
    web.run_app(app(ReadyServer(ready)), host="127.0.0.1", port=port, print=None, access_log=None)


@asynccontextmanager
async def serving(tokenizer: Any) -> AsyncIterator[str]:
    """The URL of a server in a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words, end = tokenizer.encode(TEXT, add_special_tokens=False), tokenizer.eos_token_id
    server = subprocess.Popen([sys.executable, __file__, "serve", str(port), json.dumps(words), str(end)])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


class Tool:
    """Answers every action with as many tokens; notes this process's CPU time at each."""

    def __init__(self, prompt: str, observation: str, turns: int, times: list[float]) -> None:
        self.prompt, self.observation, self.left, self.times = prompt, observation, turns, times

    async def reset(self, task: int) -> list[Message]:
        return [{"role": "system", "content": "Use the tools."}, {"role": "user", "content": self.prompt}]

    async def step(self, action: str) -> StepResult:
        self.times.append(time.process_time())
        self.left -= 1
        return StepResult(self.observation, reward=1.0, done=not self.left, role="tool")

    async def close(self) -> None:
        pass


@functools.cache
def text_of(tokenizer: Any, tokens: int) -> str:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    return tokenizer.decode((ids * (1 + tokens // len(ids)))[:tokens])


class Load:
    """Episodes over one engine."""

    def __init__(self, url: str, tokenizer: Any) -> None:
        self.tokenizer, self.codec = tokenizer, Codec(tokenizer)
        self.engine = VLLMEngine([url], len(tokenizer), timeout=60.0)
        self.sampling = Sampling(max_tokens=ACTION, stop_token_ids=(tokenizer.eos_token_id,))

    async def episode(self, turns: int, tokens: int, number: int, times: list[float]) -> int:
        """Play one of `turns` turns and about `tokens` tokens; returns the tokens that it has."""
        observed = (tokens - turns * ACTION) // turns  # of the prompt and of each observation
        tool = Tool(text_of(self.tokenizer, observed), text_of(self.tokenizer, observed - 20), turns, times)
        limits = Limits(max_turns=turns, max_context=2 * tokens, step_timeout=60.0)
        played = await run_episode(
            self.engine, tool, number, self.codec, limits, self.sampling, prompt_index=number, sample=0, seed=1
        )
        assert (played.turns, played.end_reason) == (turns, "done"), played.info
        return len(played.token_ids)

    async def turns(self, rounds: int, at_once: int = 16) -> tuple[list[float], int]:
        """CPU seconds a turn of `at_once` episodes at a time, of each round, and the tokens of an episode."""
        seconds = []
        for number in range(rounds + 1):
            started = time.process_time()
            sizes = await asyncio.gather(*(self.episode(TURNS, TOKENS, n, []) for n in range(at_once)))
            seconds += [(time.process_time() - started) / (at_once * TURNS)] if number else []  # the first warms up
        return seconds, sizes[0]

    async def growth(self, rounds: int) -> tuple[list[float], list[float]]:
        """CPU seconds of turns at about `NEAR` and `FAR` tokens of context: in each round the 8 that are nearest."""
        size = TOKENS // TURNS
        turns = FAR // size + 4
        near, far = [], []
        for number in range(rounds + 1):
            times: list[float] = []
            await self.episode(turns, turns * size, number, times)
            took = np.diff(times)  # [n]: from the n-th answer to the next, at about (n + 1.5) * size tokens of context
            for found, place in ((near, NEAR // size), (far, FAR // size)):
                found += took[place - 5 : place + 3].tolist() if number else []
        return near, far

    async def answer(self, rounds: int) -> list[float]:
        """CPU seconds of a request that is answered with `LONG` tokens, of each round."""
        sampling = Sampling(max_tokens=LONG, stop_token_ids=self.sampling.stop_token_ids)
        prompt = self.tokenizer.encode(TEXT, add_special_tokens=False)
        seconds = []
        for number in range(rounds + 1):
            started = time.process_time()
            count = len((await self.engine.generate(prompt, sampling)).token_ids)
            seconds += [time.process_time() - started] if number else []
            assert count == LONG
        return seconds


def in_ms(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.2f} ms of CPU, the least {1e3 * min(seconds):.2f}"


async def run(options: argparse.Namespace) -> None:
    """Print what was asked for."""
    from real_models import qwen

    tokenizer = qwen()
    gc.collect()
    gc.freeze()  # as train.py does
    async with serving(tokenizer) as url:
        load = Load(url, tokenizer)
        if options.what == "turns":
            seconds, tokens = await load.turns(options.rounds)
            print(f"{TURNS} turns of {ACTION} sampled tokens, {tokens} in all, a turn: {in_ms(seconds)}")
            near, far = await load.growth(max(2, options.rounds // 2))
            print(f"one episode alone: at {NEAR} tokens of context {in_ms(near)}")
            print(f"                   at {FAR} tokens of context {in_ms(far)}")
        elif options.what == "answer":
            print(f"an answer of {LONG} tokens: {in_ms(await load.answer(4 * options.rounds))}")
        else:
            await load.turns(1)
            profile = cProfile.Profile(time.process_time)
            profile.enable()
            await load.turns(options.rounds)
            profile.disable()
            pstats.Stats(profile).sort_stats(options.sort).print_stats(60)
        await load.engine.close()
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    for name in ("turns", "answer", "profile"):
        command = commands.add_parser(name)
        command.add_argument("--rounds", type=int, default=8)
        command.add_argument("--sort", default="tottime")
    command = commands.add_parser("serve")
    command.add_argument("port", type=int)
    command.add_argument("words", type=json.loads)
    command.add_argument("end", type=int)
    options = parser.parse_args()
    serve(options.port, options.words, options.end) if options.what == "serve" else asyncio.run(run(options))
