"""One vLLM server for a whole test session: `flashrl serve-rollout` in vLLM's own environment."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from server_processes import free_port
from tiny import write_model
from transformers import AutoModelForCausalLM

from nemo_flashrl.records import Generation, Sampling
from nemo_flashrl.rehearsal.warm_start import make_tokenizer

VOCAB = 515
CONTEXT = 1024
EXACT = 1e-4  # nats, fp32 on both sides
# vLLM's attention on a CPU needs heads of at least 32.
SIZES = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT}
CONFIG = """
output: {folder}/runs
model: {{path: {model}, context_length: {context}, precision: fp32}}
environment: {{name: letters.Letters}}
rollout: {{engine: vllm, batch_size: 32}}
"""


def rollout_python() -> Path | None:
    """The interpreter of vLLM's environment (`make rollout-venv`); None where it is not installed."""
    python = ROOT / os.environ.get("ROLLOUT_VENV", ".venv-rollout") / "bin" / "python"
    return python if python.is_file() else None


class RealServer:
    """Begun at once, waited for when it is needed, ended with the process that began it; of a model of its own or one.

    `overrides` are of the server's configuration.
    """

    def __init__(self, model: Path | None = None, *overrides: str) -> None:
        folder = self._folder = Path(tempfile.mkdtemp(prefix="flashrl-test-server-"))
        self.model = model or write_model(folder / "model", vocab_size=VOCAB, **SIZES)
        if not (self.model / "tokenizer.json").exists():
            make_tokenizer().save_pretrained(self.model)
        config = folder / "serve.yaml"
        config.write_text(CONFIG.format(folder=folder, model=self.model, context=CONTEXT))
        self.log, self.port = folder / "server.log", free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [rollout_python(), "-m", "nemo_flashrl.cli", "serve-rollout", config, *overrides]
        # Nothing of the tests' own environment may lend the server a module.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), "--follow", str(os.getpid())],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=folder,
            )

    def wait(self) -> None:
        """Until it says that it is ready; a busy machine takes minutes."""
        while "is ready" not in self.log.read_text():
            assert self.process.poll() is None, f"the server ended\n{self.log.read_text()[-6000:]}"
            time.sleep(0.2)

    def vllm_process(self) -> int:
        """vLLM's first process, the leader of its group."""
        return int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[0])

    def end(self) -> int:
        """SIGTERM, and its exit code; its folder goes, the log with it."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        shutil.rmtree(self._folder)
        return code


@contextlib.contextmanager
def served(model: Path | None = None, *overrides: str) -> Iterator[RealServer]:
    """A ready server, ended with the block unless a test has ended it; skipped where vLLM is not installed."""
    if rollout_python() is None:
        pytest.skip("vLLM is not installed here: `make rollout-venv` does it on Linux x86-64")
    server = RealServer(model, *overrides)
    try:
        server.wait()
        yield server
    finally:
        if server.process.poll() is None:
            server.end()


def check_three_syncs(kind: Callable[..., Any], server: RealServer) -> None:
    """New values for every tensor, three times: after each the server's log-probs are transformers' of these values.

    `kind` is the engine that brings them. The head of the sync before, on the new trunk, is told apart.
    """
    model = AutoModelForCausalLM.from_pretrained(server.model).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)

    async def story() -> None:
        engine = kind([server.url], VOCAB, timeout=240.0)
        for version in (1, 2, 3):
            old_head = model.lm_head.weight.clone()
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
            await engine.load_weights(model.named_parameters(), version)  # a tied head is not among them
            answer = await engine.generate([3, 1, 4], Sampling(max_tokens=64, seed=version))
            assert answer.versions == (version,) * 64
            hidden = model.model(torch.tensor([[3, 1, 4, *answer.token_ids]])).last_hidden_state[0, 2:-1]
            assert _distance(hidden @ model.lm_head.weight.T, answer) <= EXACT
            assert _distance(hidden @ old_head.T, answer) > 0.1
        await engine.close()

    asyncio.run(story())


def _distance(logits: torch.Tensor, answer: Generation) -> float:
    """Largest difference to the sampler's log-probs, in nats; `logits` [T, V] for the T sampled tokens."""
    scores = torch.log_softmax(logits, -1).gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    return float((scores - torch.tensor(answer.logprobs)).abs().max())
