"""The last of the real server, of which only this test may come after: kill -9 with requests in flight."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time

from real_server import VOCAB, RealServer

from nemo_flashrl.records import Sampling
from nemo_flashrl.rollout import VLLMEngine


def test_kill_of_the_only_server(vllm_server: RealServer) -> None:
    """A clear error within the time-out, the server is being started again, and SIGTERM leaves nothing behind."""

    async def story() -> None:
        engine = VLLMEngine([vllm_server.url], VOCAB, version=0, timeout=30.0)
        await engine.generate([1, 2], Sampling(max_tokens=4))
        engine._pool.timeout = 2.0
        requests = [asyncio.create_task(engine.generate([n], Sampling(max_tokens=900, seed=n))) for n in range(8)]
        await asyncio.sleep(0.3)
        os.kill(vllm_server.vllm_process(), signal.SIGKILL)
        started = time.monotonic()
        answers = await asyncio.gather(*requests, return_exceptions=True)
        assert all("no rollout server came up in 2 s" in str(answer) for answer in answers)
        assert time.monotonic() - started < 60
        assert engine.faults["servers_fallen"] == 1
        await engine.close()

    asyncio.run(story())
    while "is started again" not in vllm_server.log.read_text():
        time.sleep(0.1)
    group = vllm_server.vllm_process()
    assert vllm_server.end() == 128 + signal.SIGTERM
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", vllm_server.port)) != 0
    try:
        os.killpg(group, 0)
        raise AssertionError("a process of the server is left")
    except ProcessLookupError:
        pass
