"""A real vLLM server on this machine: what the engine costs beside a bare client, and what a refit costs.

    python benchmarks/rollouts_server.py overhead    # tokens/s of a bare concurrent client, VLLMEngine, Collector
    python benchmarks/rollouts_server.py refit       # seconds and peak extra memory, a model of 52M parameters
    python benchmarks/rollouts_server.py answers     # reading long answers, before and after gc.freeze; no server

Needs `make rollout-venv`. The server runs on the same cores as its client.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from nemo_flashrl.engines import Engine, VLLMEngine
from nemo_flashrl.engines.vllm import VLLMDialect
from nemo_flashrl.environments.environment import Message, StepResult
from nemo_flashrl.records import Generation, Sampling
from nemo_flashrl.rehearsal.warm_start import make_tokenizer
from nemo_flashrl.rollout.collector import Collector
from nemo_flashrl.rollout.episode import Limits
from nemo_flashrl.rollout.prompts import PromptStream
from nemo_flashrl.weight_sync.probe import Probe, ProbedWeights, probe_token_ids

ROOT = Path(__file__).parents[1]
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
LARGE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
CONFIG = """
output: {folder}/runs
model: {{path: {folder}/model, context_length: 1024, precision: fp32}}
environment: {{name: key_value_store}}
rollout: {{engine: vllm, batch_size: 64}}
"""


@dataclass(frozen=True)
class Load:
    requests: int  # of a block
    at_once: int
    tokens: int  # of an answer, at most
    context: int  # of prompt and answer, at most


# A prompt has 6 to 96 tokens, so that answers in "stream" have 64 to 154 and end one by one, as those of agents do.
# In "burst" all begin and all end together: nothing hides what is done before the first and after the last.
LOADS = {"stream": Load(256, 64, 160, 160), "burst": Load(64, 64, 32, 512)}


def write_model(folder: Path, vocab_size: int, sizes: dict[str, int]) -> Path:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab_size, num_key_value_heads=sizes["num_attention_heads"], tie_word_embeddings=False, **sizes
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    return folder / "model"


@asynccontextmanager
async def serving(config: Path, log: Path, *overrides: str) -> AsyncIterator[str]:
    """The URL of a server over the model of `config`; what it says goes to `log`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    python = ROOT / os.environ.get("ROLLOUT_VENV", ".venv-rollout") / "bin" / "python"
    command = [python, "-m", "nemo_flashrl.cli", "serve-rollout", config, *overrides, "--port", str(port)]
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


def configured(folder: Path) -> tuple[Path, Path]:
    """A configuration over `folder`/model, and where its server logs."""
    (folder / "serve.yaml").write_text(CONFIG.format(folder=folder))
    return folder / "serve.yaml", folder / "server.log"


class Question:
    """One turn; any answer ends it."""

    async def reset(self, task: int) -> list[Message]:
        return [{"role": "user", "content": f"Q {' '.join(str(1000 + task))} : " * (1 + task % 16)}]

    async def step(self, action: str) -> StepResult:
        return StepResult(reward=float("0" in action), done=True)

    async def close(self) -> None:
        pass


class Recorder:
    """The engine, and what was asked of it."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.requests = engine, []
        self.version, self.faults = engine.version, engine.faults

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        self.requests.append((list(token_ids), sampling))
        return await self.engine.generate(token_ids, sampling)


async def overhead(folder: Path, rounds: int) -> None:
    """The same requests in short blocks, again and again in another order: the machine's moods fall on all alike."""
    tokenizer = make_tokenizer()
    write_model(folder, len(tokenizer), SMALL)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
    async with serving(*configured(folder)) as url, aiohttp.ClientSession(connector=connector) as session:
        engine = VLLMEngine([url], len(tokenizer))
        gc.collect()
        gc.freeze()  # as train.py does, for all three alike
        for name, load in LOADS.items():
            blocks = await in_turns(await ways(load, engine, tokenizer, session, url), rounds)
            print(name, json.dumps({way: compared(own, blocks, load) for way, own in blocks.items()}, indent=1))
        await engine.close()


async def ways(
    load: Load, engine: VLLMEngine, tokenizer: Any, session: aiohttp.ClientSession, url: str
) -> dict[str, Callable[[], Awaitable[list[list[int]]]]]:
    """Three ways to the same answers; each keeps `load.at_once` requests going until all are answered."""
    dialect = VLLMDialect()

    def collector(engine: Engine) -> Collector:
        limits, sampling = Limits(max_context=load.context, step_timeout=60.0), Sampling(max_tokens=load.tokens)
        sizes = {"batch_size": load.requests, "max_in_flight": load.at_once}
        prompts = PromptStream(load.requests)
        return Collector(engine, Question, range(load.requests), tokenizer, prompts, limits, sampling, **sizes)

    recorder = Recorder(engine)
    await collector(recorder).collect(0)

    async def post(token_ids: list[int], sampling: Sampling) -> list[int]:
        body, limit = msgspec.json.encode(dialect.request(token_ids, sampling)), aiohttp.ClientTimeout(None)
        headers = {"Content-Type": "application/json"}
        async with session.post(url + dialect.generate_path, data=body, headers=headers, timeout=limit) as answer:
            return (await answer.json())["choices"][0]["token_ids"]

    async def generate(token_ids: list[int], sampling: Sampling) -> list[int]:
        return list((await engine.generate(token_ids, sampling)).token_ids)

    async def all_by(ask: Callable[[list[int], Sampling], Awaitable[list[int]]]) -> list[list[int]]:
        left, answers = iter(recorder.requests), []

        async def ask_on() -> None:
            for request in left:
                answers.append(await ask(*request))

        await asyncio.gather(*(ask_on() for _ in range(load.at_once)))
        return answers

    async def by_collector() -> list[list[int]]:
        batch = await collector(engine).collect(0)
        return [t.token_ids[t.action_mask].tolist() for t in batch.trajectories]

    return {"bare client": lambda: all_by(post), "VLLMEngine": lambda: all_by(generate), "Collector": by_collector}


Block = tuple[float, float, int]  # seconds, the client's CPU seconds, tokens


async def in_turns(ways: dict[str, Callable[[], Awaitable[list[list[int]]]]], rounds: int) -> dict[str, list[Block]]:
    """Each way's blocks, one a round; all must get the same tokens."""
    blocks: dict[str, list[Block]] = {name: [] for name in ways}
    orders = list(itertools.permutations(ways))
    for number in range(rounds + 1):
        answers = []
        for name in orders[number % len(orders)]:
            started, busy = time.perf_counter(), time.process_time()
            answers.append(sorted(await ways[name]()))
            used = time.perf_counter() - started, time.process_time() - busy
            if number:  # the first round warms up
                blocks[name].append((*used, sum(map(len, answers[-1]))))
        assert answers[0] == answers[1] == answers[2]
    return blocks


def compared(own: list[Block], blocks: dict[str, list[Block]], load: Load) -> dict[str, Any]:
    """Medians over rounds; what is lost to the bare client's block of the same round, with its 95% interval."""
    seconds, busy, tokens = np.array(own).T
    lost = 1 - np.array(blocks["bare client"])[:, 0] / seconds
    medians = np.median(np.random.default_rng(0).choice(lost, (4000, len(lost))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    quartiles = [f"{value:.1%}" for value in np.quantile(lost, [0.25, 0.75])]
    return {
        "tokens/s": round(float(np.median(tokens / seconds))),
        "fewer tokens/s": f"{np.median(lost):.1%} ({low:.1%} to {high:.1%})",
        "fewer tokens/s, rounds' quartiles": quartiles,
        "client's CPU ms a request": round(1e3 * float(np.median(busy)) / load.requests, 3),
        "of the block's time": f"{np.median(busy / seconds):.1%}",
    }


async def refit(folder: Path, rounds: int) -> None:
    """Weights that are gathered tensor by tensor, as from shards; memory is this process's own, from /proc."""
    vocab_size = 24000
    model = AutoModelForCausalLM.from_pretrained(write_model(folder, vocab_size, LARGE)).requires_grad_(False)
    sizes = sorted(t.numel() * t.element_size() for t in model.state_dict().values())
    ids = probe_token_ids(vocab_size)
    async with serving(*configured(folder)) as url:
        engine = VLLMEngine([url], vocab_size)
        await engine.generate([1], Sampling(max_tokens=1))
        seconds, extra = [], []
        for version in range(rounds):
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


async def answers(folder: Path, rounds: int) -> None:
    """Of 8,192 tokens each, in a process that has imported what a trainer has; the last 64 are kept."""
    import nemo.lightning  # noqa: F401

    tokens, spent, began = 8192, [], []
    gc.callbacks.append(
        lambda phase, _: (
            began.append(time.perf_counter()) if phase == "start" else spent.append(time.perf_counter() - began.pop())
        )
    )
    rows = [{"token_id": n, "logprob": -1.5, "top_logprobs": [{"token_id": n, "logprob": -1.5}]} for n in range(tokens)]
    versions = [{"version": "3", "start": 0, "end": tokens}]
    choice = {"token_ids": list(range(tokens)), "logprobs": {"content": rows}, "weight_versions": versions}
    content = json.dumps({"choices": [{**choice, "finish_reason": "stop"}]}).encode()
    for name in ("as it is", "frozen"):
        kept, busy = deque(maxlen=64), time.process_time()
        spent.clear()
        for _ in range(rounds):
            kept.append(VLLMDialect().read(content, 0))
        busy = (time.process_time() - busy) / rounds
        print(f"{name}: {1e3 * busy:.1f} ms of CPU an answer, the longest collection {max(spent, default=0.0):.3f} s")
        gc.collect()
        gc.freeze()


def memory(name: str) -> int:
    """Bytes of this process, by a name of /proc/self/status."""
    row = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(row.split()[1]) * 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["overhead", "refit", "answers"])
    parser.add_argument("--rounds", type=int, help="24 for overhead, of each load, 7 for refit, 200 answers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        run, rounds = {"overhead": (overhead, 24), "refit": (refit, 7), "answers": (answers, 200)}[options.what]
        asyncio.run(run(Path(name), options.rounds or rounds))
