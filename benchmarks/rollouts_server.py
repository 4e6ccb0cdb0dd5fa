"""A real vLLM server on this machine: what the engine costs beside a bare client, and what a refit costs.

    python benchmarks/rollouts_server.py overhead    # tokens/s of a bare concurrent client and of VLLMEngine
    python benchmarks/rollouts_server.py refit       # seconds and peak extra memory, a model of 52M parameters

Needs `make rollout-venv`. The server runs on the same cores as its client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from nemo_flashrl.records import Sampling
from nemo_flashrl.rollout import VLLMEngine
from nemo_flashrl.rollout.probe import Probe, ProbedWeights, probe_token_ids
from nemo_flashrl.rollout.vllm_engine import VLLMDialect

ROOT = Path(__file__).parents[1]
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
LARGE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
CONFIG = """
output: {folder}/runs
model: {{path: {folder}/model, context_length: 1024, precision: fp32}}
environment: {{name: key_value_store}}
rollout: {{engine: vllm, batch_size: 64}}
"""
REQUESTS, TOKENS, ROUNDS = 64, 64, 12
REFITS = 7


def write_model(folder: Path, vocab_size: int, sizes: dict[str, int]) -> Path:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab_size, num_key_value_heads=sizes["num_attention_heads"], tie_word_embeddings=False, **sizes
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    return folder / "model"


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[str]:
    """The URL of a server over `folder`/model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "serve.yaml").write_text(CONFIG.format(folder=folder))
    log = folder / "server.log"
    python = ROOT / os.environ.get("ROLLOUT_VENV", ".venv-rollout") / "bin" / "python"
    command = [python, "-m", "nemo_flashrl.cli", "serve-rollout", folder / "serve.yaml", "--port", str(port)]
    with log.open("w") as file:
        server = subprocess.Popen([*command, "--follow", str(os.getpid())], stdout=file, stderr=subprocess.STDOUT)
    try:
        while "is ready" not in log.read_text():
            if server.poll() is not None:
                raise RuntimeError(log.read_text()[-4000:])
            await asyncio.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


async def overhead(folder: Path) -> None:
    """The same requests by a bare client and by the engine, in turns: the machine's moods fall on both."""
    vocab_size = 4096
    write_model(folder, vocab_size, SMALL)
    prompts = [[n + 1, 2 * n + 1, *range(3, 35)] for n in range(REQUESTS)]
    samplings = [Sampling(max_tokens=TOKENS, seed=n) for n in range(REQUESTS)]
    dialect = VLLMDialect(vocab_size)
    async with (
        serving(folder) as url,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4)) as session,
    ):
        engine = VLLMEngine([url], vocab_size)

        async def bare(n: int) -> list[int]:
            body = dialect.request(prompts[n], samplings[n])
            async with session.post(url + dialect.generate_path, json=body, timeout=aiohttp.ClientTimeout(None)) as got:
                return (await got.json())["choices"][0]["token_ids"]

        async def ours(n: int) -> list[int]:
            return list((await engine.generate(prompts[n], samplings[n])).token_ids)

        ways: dict[str, Callable[[int], Awaitable[list[int]]]] = {"bare client": bare, "VLLMEngine": ours}
        rates: dict[str, list[float]] = {name: [] for name in ways}
        cpu: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(ROUNDS + 1):
            answers = {}
            for name, ask in sorted(ways.items(), reverse=bool(number % 2)):
                started, busy = time.perf_counter(), time.process_time()
                answers[name] = await asyncio.gather(*(ask(n) for n in range(REQUESTS)))
                if number:  # the first round warms up
                    rates[name].append(REQUESTS * TOKENS / (time.perf_counter() - started))
                    cpu[name].append((time.process_time() - busy) / REQUESTS)
            assert answers["bare client"] == answers["VLLMEngine"]
        await engine.close()
    ratios = [a / b - 1 for a, b in zip(rates["bare client"], rates["VLLMEngine"], strict=True)]
    report = {name: round(statistics.median(values)) for name, values in rates.items()}
    report |= {f"{name}, client's CPU ms a request": round(1e3 * statistics.median(v), 2) for name, v in cpu.items()}
    quartiles = [f"{value:.1%}" for value in statistics.quantiles(ratios, n=4)]
    print(json.dumps(report | {"overhead by round, quartiles": quartiles}))


async def refit(folder: Path) -> None:
    """Weights that are gathered tensor by tensor, as from shards; memory is this process's own, from /proc."""
    vocab_size = 24000
    model = AutoModelForCausalLM.from_pretrained(write_model(folder, vocab_size, LARGE)).requires_grad_(False)
    sizes = sorted(t.numel() * t.element_size() for t in model.state_dict().values())
    ids = probe_token_ids(vocab_size)
    async with serving(folder) as url:
        engine = VLLMEngine([url], vocab_size)
        await engine.generate([1], Sampling(max_tokens=1))
        seconds, extra = [], []
        for version in range(REFITS):
            for parameter in model.parameters():
                parameter.add_(1e-3 * torch.randn_like(parameter))
            scores = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1], -1)
            known = scores.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
            del scores
            stream = ((name, tensor.clone()) for name, tensor in model.state_dict().items())
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            before = memory("VmRSS")
            started = time.perf_counter()
            await engine.load_weights(ProbedWeights(stream, Probe(ids, tuple(known), 1e-3)), version)
            seconds.append(time.perf_counter() - started)
            extra.append(memory("VmHWM") - before)
        await engine.close()
    print(
        json.dumps(
            {
                "parameters": sum(sizes) // 4,
                "seconds, median": round(statistics.median(seconds), 2),
                "seconds, all": [round(s, 2) for s in seconds],
                "peak extra MB, largest": round(max(extra) / 1e6, 1),
                "two largest tensors MB": round(sum(sizes[-2:]) / 1e6, 1),
                "all tensors MB": round(sum(sizes) / 1e6, 1),
            }
        )
    )


def memory(name: str) -> int:
    """Bytes of this process, by a name of /proc/self/status."""
    row = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(row.split()[1]) * 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["overhead", "refit"])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        asyncio.run({"overhead": overhead, "refit": refit}[parser.parse_args().what](Path(name)))
