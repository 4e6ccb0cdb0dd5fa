"""What the collector asks of its processor beside a bare client with the same requests to the same server.

Seconds are the machine's moods, so the promise on tokens/s is shown by `benchmarks/rollouts_server.py overhead`.
"""

from __future__ import annotations

import asyncio
import time

import aiohttp
from real_server import VOCAB, RealServer
from rollouts_server import Load, ways

from nemo_flashrl.engines import VLLMEngine
from nemo_flashrl.rehearsal.warm_start import make_tokenizer

MOST = 4.0  # times the bare client's; 1.7 to 2.3 are usual


def test_cost_beside_a_bare_client(vllm_server: RealServer) -> None:
    """The same answers, and processor time of one order of magnitude, prompts and trajectories included."""

    async def measured() -> tuple[dict[str, float], list[list[list[int]]], int]:
        engine = VLLMEngine([vllm_server.url], VOCAB)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=1)) as session:
            load = Load(requests=64, at_once=32, tokens=160, context=160)
            known = await ways(load, engine, make_tokenizer(), session, vllm_server.url)
            seconds, answers = dict.fromkeys(known, 0.0), []
            for _ in range(2):
                for name, way in known.items():
                    started = time.process_time()
                    answers.append(sorted(await way()))
                    seconds[name] += time.process_time() - started
        faults = engine.faults.total()
        await engine.close()
        return seconds, answers, faults

    seconds, answers, faults = asyncio.run(measured())
    assert len(answers[0]) == 64 and len(set(map(len, answers[0]))) > 8
    assert all(answer == answers[0] for answer in answers)
    assert seconds["Collector"] < MOST * seconds["bare client"], seconds
    assert faults == 0
