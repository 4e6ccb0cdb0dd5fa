"""The last of the real server, of which only this test may come after: kill -9 with requests in flight."""

from __future__ import annotations

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import run_ranks
from real_server import RealServer

CONFIG = """
defaults: [/algorithm: flash_reinforce, _self_]
output: {folder}/run
model: {{path: {model}, context_length: 512, precision: fp32}}
environment: {{name: letters.Letters}}
rollout: {{engine: vllm, servers: ["{url}"], server_timeout: 10, batch_size: 32, max_tokens_per_turn: 200}}
trainer: {{steps: 1000}}
checkpoint: {{every_steps: 0}}
"""


def test_kill_of_the_only_server(vllm_server: RealServer, tmp_path: Path) -> None:
    """The run ends with the reason and code 1, in time; the server is started again, and SIGTERM leaves nothing."""
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.format(folder=tmp_path, model=vllm_server.model, url=vllm_server.url))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_ranks, 1, "training", str(config), exit_codes=(1,))
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            assert not running.done(), running.result()
            time.sleep(0.1)
        os.kill(vllm_server.vllm_process(), signal.SIGKILL)
        said = running.result()
    assert "no rollout server came up in 10 s" in said or "no rollout server took the weights" in said
    while "is restarted" not in vllm_server.log.read_text():
        time.sleep(0.1)
    group = vllm_server.vllm_process()
    assert vllm_server.end() == 128 + signal.SIGTERM
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", vllm_server.port)) != 0
    deadline = time.monotonic() + 60  # what SIGKILL has ended is there until it is reaped
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.1)
