"""Servers that die, hang, lie or refuse: real processes, and the engine over them."""

from __future__ import annotations

import asyncio
import functools
import http.server
import math
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doubles import DONE, ScriptedEnvironment, collector, numbers
from server_processes import StandIn, anew, ended_after, free_port
from stand_in_server import START, V

from nemo_flashrl.engines import Engine, SGLangEngine, VLLMEngine
from nemo_flashrl.engines.server_pool import NoServer
from nemo_flashrl.environments.environment import StepResult
from nemo_flashrl.records import Generation, Sampling
from nemo_flashrl.weight_sync.probe import Probe, ProbedWeights

LONG = 60.0  # seconds that nothing here comes near: a time-out of this length is a failed test


@pytest.fixture(scope="module")
def two() -> Iterator[list[StandIn]]:
    yield from ended_after([StandIn(), StandIn()])


@pytest.fixture
def pair(two: list[StandIn]) -> list[StandIn]:
    """Two servers as they were at first."""
    return anew(two)


def engine(servers: list[StandIn], kind: type = VLLMEngine, **options: Any) -> Any:
    options = {"timeout": LONG, "health_seconds": 0.5} | options
    return kind([server.url for server in servers], V, **options)


def run(over: Any, *coroutines: Any) -> list[Any]:
    """Await all, then close the engine."""

    async def all_of() -> list[Any]:
        try:
            return await asyncio.wait_for(asyncio.gather(*coroutines), LONG)
        finally:
            await over.close()

    return asyncio.run(all_of())


def check(generation: Generation, sampling: Sampling, logits: np.ndarray = START, version: int = 0) -> None:
    """Its log-probs are those of `logits` at the sampling's temperature."""
    expected = torch.log_softmax(torch.tensor(logits) / sampling.temperature, -1)[list(generation.token_ids)]
    assert len(generation.token_ids) == sampling.max_tokens
    assert torch.tensor(generation.logprobs) == pytest.approx(expected, abs=1e-5)
    assert set(generation.versions) == {version}


def weights(value: float, version: int, *, off: float = 0.0) -> ProbedWeights:
    """Logits that rise by `value`, and their probe, `off` nats beside the truth."""
    logits = torch.linspace(0.0, value, V)
    ids = tuple(range(V))
    logprobs = torch.log_softmax(logits, -1)[1:] + off
    return ProbedWeights([("w", logits)], Probe(ids, tuple(logprobs.tolist()), 1e-3))


@pytest.mark.parametrize("kind", [VLLMEngine, SGLangEngine])
def test_tokens_logprobs_and_versions(pair: list[StandIn], kind: type) -> None:
    """Hand-derived: a flat distribution over 32 tokens has log-prob -ln 32 at every temperature."""
    over = engine(pair, kind)
    assert isinstance(over, Engine)
    sampling = Sampling(temperature=0.7, max_tokens=6, seed=3)

    async def story() -> None:
        first, same, other = await asyncio.gather(
            over.generate([1, 2], sampling), over.generate([1, 2], sampling), over.generate([1, 2], Sampling(seed=4))
        )
        check(first, sampling)
        assert first == same and other.token_ids[:6] != first.token_ids
        await over.load_weights(weights(0.0, 7), 7)
        assert over.version == 7
        flat = await over.generate([1, 2], sampling)
        assert flat.logprobs == pytest.approx([-math.log(32)] * 6, abs=1e-6) and flat.versions == (7,) * 6

    run(over, story())


def test_the_logprob_is_the_sampled_tokens(pair: list[StandIn]) -> None:
    """An answer lists two tokens at a step: {31: -0.1, sampled: its own}. The first one's would be -0.1."""
    pair[0].behave(other_first=True)
    over = engine(pair[:1])
    sampling = Sampling(max_tokens=8)
    (generation,) = run(over, over.generate([1], sampling))
    check(generation, sampling)
    assert -0.1 not in generation.logprobs


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"nonsense": "status"}, "status"),
        ({"nonsense": "malformed"}, "malformed"),
        ({"nonsense": "shape"}, "malformed"),
        ({"token": True}, "token_id"),
        ({"other_token": True}, "malformed"),
        ({"drop_row": True}, "token_count"),
        ({"nan": True}, "logprob"),
    ],
)
def test_nonsense_is_asked_again_elsewhere(pair: list[StandIn], how: dict[str, Any], reason: str) -> None:
    over = engine(pair)
    sampling = Sampling(max_tokens=5)

    async def story() -> None:
        await over.generate([1], sampling)  # both are adopted
        pair[0].behave(**how)
        for generation in await asyncio.gather(*(over.generate([1, n], sampling) for n in range(8))):
            check(generation, sampling)
        assert over.faults == {reason: 4}  # half of them, by the load

    run(over, story())


def test_nonsense_everywhere_ends_in_an_error(pair: list[StandIn]) -> None:
    over = engine(pair)

    async def story() -> None:
        await over.generate([1], Sampling())
        for server in pair:
            server.behave(nonsense="malformed")
        with pytest.raises(RuntimeError, match="failed 4 times.*did not answer with JSON"):
            await over.generate([1], Sampling())
        assert over.faults["malformed"] == 4

    run(over, story())


def test_killed_server_costs_nothing_but_its_requests(pair: list[StandIn]) -> None:
    """kill -9 with 16 requests in flight: each is answered once, the dead server's by the other one."""
    over = engine(pair)
    sampling = Sampling(max_tokens=4)

    async def story() -> None:
        await over.generate([1], sampling)
        for server in pair:
            server.behave(seconds=0.5)
        before = pair[1].counts()["/inference/v1/generate"]
        requests = [asyncio.create_task(over.generate([1, n], sampling)) for n in range(16)]
        while pair[0].counts().get("/inference/v1/generate", 0) < 8:
            await asyncio.sleep(0.01)
        pair[0].signal(signal.SIGKILL)
        for generation in await asyncio.gather(*requests):
            check(generation, sampling)
        assert pair[1].counts()["/inference/v1/generate"] - before == 16
        assert over.faults["servers_lost"] == 1

    run(over, story())


def test_killed_server_costs_no_episode(pair: list[StandIn]) -> None:
    """kill -9 in the middle of 12 episodes of three turns: each ends once, with all its turns, on the other server."""
    over = engine(pair)

    async def story() -> None:
        going_on = StepResult("> k 4 0")
        plays = collector(
            over, lambda: ScriptedEnvironment([going_on, going_on, DONE]), batch_size=12, max_in_flight=12
        )
        await over.generate([1], Sampling(max_tokens=1))
        for server in pair:
            server.behave(seconds=0.5)
        before = pair[0].counts()["/inference/v1/generate"]
        batches = asyncio.create_task(plays.collect(0))
        while pair[0].counts()["/inference/v1/generate"] < before + 9:  # half of the 12 have begun their second turn
            await asyncio.sleep(0.01)
        pair[0].signal(signal.SIGKILL)
        for first in (0, 12):
            batch = await batches if first == 0 else await plays.collect(0)
            assert numbers(batch) == list(range(first, first + 12))
            assert {(t.turns, t.end_reason) for t in batch.trajectories} == {(3, "done")}
        assert over.faults["servers_lost"] == 1 and over.faults.total() > 3
        await plays.close()

    run(over, story())


def test_hung_server_is_left(pair: list[StandIn]) -> None:
    over = engine(pair)

    async def story() -> None:
        await over.generate([1], Sampling())
        pair[0].signal(signal.SIGSTOP)
        try:
            for generation in await asyncio.gather(*(over.generate([1], Sampling()) for _ in range(4))):
                check(generation, Sampling())
        finally:
            pair[0].signal(signal.SIGCONT)
        assert over.faults["servers_lost"] == 1

    run(over, story())


def test_long_turn_on_a_healthy_server_is_sent_once(pair: list[StandIn]) -> None:
    """It takes as long as six looks at its health take, and the server's health is looked at meanwhile."""
    over = engine(pair[:1])

    async def story() -> None:
        await over.generate([1], Sampling())
        before = pair[0].counts()
        pair[0].behave(seconds=3.0)
        check(await over.generate([1], Sampling()), Sampling())
        after = pair[0].counts()
        assert after["/inference/v1/generate"] - before["/inference/v1/generate"] == 1
        assert after["/health"] - before["/health"] >= 3
        assert not over.faults

    run(over, story())


def test_all_dead_is_an_error_in_time(pair: list[StandIn]) -> None:
    over = engine(pair, timeout=1.0)

    async def story() -> None:
        await over.generate([1], Sampling())
        for server in pair:
            server.signal(signal.SIGKILL)
        started = time.monotonic()
        answers = await asyncio.gather(*(over.generate([1], Sampling()) for _ in range(8)), return_exceptions=True)
        assert all("no rollout server came up in 1 s" in str(answer) for answer in answers)
        assert time.monotonic() - started < LONG / 2

    run(over, story())


def test_server_that_came_back_gets_the_weights_of_the_moment(pair: list[StandIn]) -> None:
    """Started anew it serves its first weights; nobody sees a token of them."""
    over = engine(pair[:1])
    sampling = Sampling(max_tokens=4)

    async def story() -> None:
        await over.load_weights(weights(0.0, 5), 5)
        pair[0].end()
        pair[0].start()
        generation = await over.generate([1], sampling)
        check(generation, sampling, np.zeros(V, np.float32), version=5)

    run(over, story())


def test_a_sync_waits_for_a_server_that_fell_meanwhile(pair: list[StandIn], capfd) -> None:
    """Nobody asks for anything while the trainer trains; the only server is started again after 2 s."""
    over = engine(pair[:1])

    async def story() -> None:
        await over.load_weights(weights(0.0, 5), 5)
        pair[0].end()
        loading = asyncio.create_task(over.load_weights(weights(1.0, 6), 6))
        await asyncio.sleep(2.0)
        assert not loading.done()
        pair[0].start()
        await loading
        generation = await over.generate([1], Sampling())
        assert set(generation.versions) == {6}

    run(over, story())
    assert f"{pair[0].url} is up again, back in the pool" in capfd.readouterr().err


def test_a_sync_without_servers_is_an_error_in_time(pair: list[StandIn]) -> None:
    over = engine(pair, timeout=1.0)

    async def story() -> None:
        await over.load_weights(weights(0.0, 1), 1)
        for server in pair:
            server.end()
        with pytest.raises(RuntimeError, match="no rollout server came up in 1 s"):
            await over.load_weights(weights(1.0, 2), 2)
        assert len(list(over._home.folder.glob("sync-*"))) == 1

    run(over, story())


def test_a_server_that_hangs_in_a_sync_is_left(pair: list[StandIn]) -> None:
    """Its health is looked at as that of one that owes an answer: nobody waits for the time-out of the call."""
    over = engine(pair)

    async def story() -> None:
        await over.load_weights(weights(0.0, 1), 1)
        pair[0].signal(signal.SIGSTOP)
        try:
            started = time.monotonic()
            await over.load_weights(weights(1.0, 2), 2)
            assert time.monotonic() - started < LONG / 2
        finally:
            pair[0].signal(signal.SIGCONT)
        assert [server.up for server in over.pool.servers] == [False, True]

    run(over, story())


def test_refused_sync_leaves_the_old_weights(pair: list[StandIn]) -> None:
    over = engine(pair)
    sampling = Sampling(max_tokens=4)

    async def story() -> None:
        await over.load_weights(weights(0.0, 1), 1)
        with pytest.raises(RuntimeError, match=r"no rollout server took the weights of version 2.*update_weights"):
            await over.load_weights([("v", torch.zeros(3))], 2)  # the model has no such tensor
        assert over.version == 1 and over.faults["sync_status"] == 6  # two servers, three tries
        check(await over.generate([1], sampling), sampling, np.zeros(V, np.float32), version=1)
        assert len(list(over._home.folder.glob("sync-*"))) == 1

    run(over, story())
    assert not over._home.folder.exists()


def test_sync_is_tried_again_and_probed(pair: list[StandIn]) -> None:
    """One 500 in the middle costs a try; a server whose log-probs are 1 nat off is left out, the other serves."""
    over = engine(pair)

    async def story() -> None:
        await over.generate([1], Sampling())
        pair[0].behave(fail="/update_weights")
        await over.load_weights(weights(1.0, 1), 1)
        assert over.faults == {"sync_status": 1}
        pair[0].behave(off=1.0)
        await over.load_weights(weights(0.0, 2), 2)
        assert over.faults == {"sync_status": 1, "sync_probe": 3, "servers_lost": 1}
        before = pair[0].counts()["/inference/v1/generate"]
        for generation in await asyncio.gather(*(over.generate([1], Sampling()) for _ in range(4))):
            check(generation, Sampling(), np.zeros(V, np.float32), version=2)
        assert pair[0].counts()["/inference/v1/generate"] == before
        pair[0].behave()
        third = weights(1.0, 3)
        await over.load_weights(third, 3)  # it is given another chance
        assert 0 <= third.probe.largest < 1e-5
        assert [server.up for server in over.pool.servers] == [True, True]

    run(over, story())


def test_probe_sees_weights_that_are_not_the_trainers(pair: list[StandIn]) -> None:
    over, other = engine(pair), weights(1.0, 1, off=0.01)

    async def story() -> None:
        said = r"other log-probs than the trainer.*0\.01 nats.*0\.001\. Look at: a tied"
        with pytest.raises(RuntimeError, match=said):
            await over.load_weights(other, 1)
        assert other.probe.largest is None

    run(over, story())


def test_server_that_dies_within_a_sync(pair: list[StandIn]) -> None:
    over = engine(pair)

    async def story() -> None:
        await over.generate([1], Sampling())
        pair[0].behave(update_seconds=30)
        loading = asyncio.create_task(over.load_weights(weights(0.0, 1), 1))
        while not pair[0].counts().get("/update_weights"):
            await asyncio.sleep(0.01)
        pair[0].signal(signal.SIGKILL)
        await loading
        assert over.version == 1
        check(await over.generate([1], Sampling()), Sampling(), np.zeros(V, np.float32), version=1)

    run(over, story())


def test_stream_that_breaks_off(pair: list[StandIn]) -> None:
    over = engine(pair)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.zeros(V)
        raise OSError("the trainer's rank 3 is gone")

    async def story() -> None:
        with pytest.raises(OSError, match="rank 3"):
            await over.load_weights(stream(), 1)
        check(await over.generate([1], Sampling()), Sampling())
        assert not list(over._home.folder.glob("sync-*"))

    run(over, story())


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"raw": True}, "do not change with the temperature.*processed_logprobs"),
        ({"top_k": 5}, "truncates"),
        ({"top_k": 28}, "0.* in the whole distribution"),
        ({"fail": "/init_weight_transfer_engine"}, "lacks our weight-transfer backend"),
        (
            {"context": 127},
            r"takes at most 127 tokens .* may come to 128 \(model.context_length\): start it with .*serve-rollout",
        ),
    ],
)
def test_refused_at_start(pair: list[StandIn], how: dict[str, Any], words: str) -> None:
    pair[1].behave(**how)
    over = engine(pair, context=128)
    with pytest.raises(ValueError, match=words) as refused:
        run(over, over.generate([1], Sampling()))
    assert pair[1].url in str(refused.value) and "serve-rollout" in str(refused.value)


def test_server_without_the_routes(pair: list[StandIn], tmp_path: Path) -> None:
    (tmp_path / "health").write_text("")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        over = VLLMEngine([f"http://127.0.0.1:{other.server_port}"], V, timeout=LONG)
        with pytest.raises(ValueError, match="lacks the routes for new weights.*vLLM 0.32"):
            run(over, over.generate([1], Sampling()))
        other.shutdown()


def test_what_the_engine_refuses_itself(pair: list[StandIn]) -> None:
    with pytest.raises(ValueError, match="servers"):
        VLLMEngine([], V)
    over = engine(pair)

    async def story() -> None:
        for tokens in ([], [-1], [V]):  # a token beyond the vocabulary kills a vLLM server
            with pytest.raises(ValueError, match="each in 0..31"):
                await over.generate(tokens, Sampling())
        assert not pair[0].counts().get("/inference/v1/generate")

    run(over, story())


def test_server_that_never_comes(tmp_path: Path) -> None:
    over = VLLMEngine([f"http://127.0.0.1:{free_port()}"], V, timeout=0.5, weights_folder=tmp_path)
    with pytest.raises(NoServer, match="no rollout server came up in 0.5 s.*Cannot connect"):
        run(over, over.generate([1], Sampling()))
    assert not list(tmp_path.iterdir())
