"""Weights broadcast over gloo to workers in other processes: all get them, or the old ones stay, whoever dies."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from server_processes import StandIn, anew, ended_after
from stand_in_server import V

from nemo_flashrl import platform
from nemo_flashrl.engines import BroadcastEngine
from nemo_flashrl.records import Sampling
from nemo_flashrl.weight_sync.probe import Probe, ProbedWeights
from nemo_flashrl.weight_sync.process_group import CONNECT, GO, STOP, WeightGroup

LONG = 120.0
BIG = 2**23  # 32 MiB, more than sockets hold: nobody is done with it before the others have taken it


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(BIG), "w": torch.zeros(V)}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def both(checkpoint: Path) -> Iterator[list[StandIn]]:
    """One worker and two; the second server's ranks are 2 and 3."""
    yield from ended_after([StandIn("broadcast_stand_in.py", checkpoint, workers) for workers in (1, 2)])


@pytest.fixture
def servers(both: list[StandIn]) -> list[StandIn]:
    """Both, well-behaved, with whatever weights they were left with."""
    return anew(both)


def weights(value: float, *, version: int = 0, **replaced: torch.Tensor) -> ProbedWeights:
    """Logits that rise by `value`; `a` sums to 6 * value."""
    logits = torch.linspace(0.0, value, V)
    probe = Probe(tuple(range(V)), tuple(torch.log_softmax(logits, -1)[1:].tolist()), 1e-3)
    named = {"a": torch.full((2, 3), value), "b": torch.ones(BIG), "w": logits} | replaced
    return ProbedWeights(list(named.items()), probe)


def run(servers: list[StandIn], story: Callable[[BroadcastEngine], Awaitable[Any]], timeout: float = LONG) -> Any:
    async def whole() -> Any:
        engine = BroadcastEngine([s.url for s in servers], V, timeout=timeout, health_seconds=5.0)
        try:
            return await asyncio.wait_for(story(engine), LONG)
        finally:
            await engine.close()

    return asyncio.run(whole())


def held(server: StandIn) -> dict[str, Any]:
    with urllib.request.urlopen(f"{server.url}/weights", timeout=10) as answer:
        return json.load(answer)


async def versions(engine: BroadcastEngine) -> set[int]:
    answers = await asyncio.gather(*(engine.generate([1], Sampling(max_tokens=4, seed=n)) for n in range(4)))
    return {version for answer in answers for version in answer.versions}


def test_every_worker_gets_every_tensor(servers: list[StandIn]) -> None:
    """a: 6 x 2; b: 2^23; w: 32 numbers from 0 to 2 sum to 32. Two syncs are one group."""

    async def story(engine: BroadcastEngine) -> None:
        for version, value in ((1, 5.0), (2, 2.0)):
            await engine.load_weights(weights(value), version)
        assert await versions(engine) == {2} and not engine.faults

    run(servers, story)
    expected = {"a": 12.0, "b": float(BIG), "w": 32.0}
    for server, workers in zip(servers, (1, 2), strict=True):
        assert held(server) == {"sums": [pytest.approx(expected)] * workers, "paused": False}
        assert server.counts()["/init_weight_transfer_engine"] == 2  # looked at, joined


def test_refused_weights_leave_the_old_ones(servers: list[StandIn]) -> None:
    """Nothing is broadcast where a name, shape or number is wrong: vLLM's reload, which clears all, does not begin."""
    bad = {
        "a has shape .*3, 2.*the model's is .*2, 3": weights(1.0, a=torch.ones(3, 2)),
        "c is no tensor of the model": weights(1.0, c=torch.ones(2)),
        "w is not finite": weights(1.0, w=torch.full((V,), torch.nan)),
        "b is missing": [("a", torch.ones(2, 3)), ("w", torch.ones(V))],
    }

    async def story(engine: BroadcastEngine) -> None:
        await engine.load_weights(weights(2.0), 1)
        for words, stream in bad.items():
            with pytest.raises(RuntimeError, match=f"no rollout server took.*{words}"):
                await engine.load_weights(stream, 2)
            assert engine.version == 1
            for server in servers:
                assert held(server)["sums"][-1] == pytest.approx({"a": 12.0, "b": float(BIG), "w": 32.0})
        assert await versions(engine) == {1}

    run(servers, story)


def test_one_server_of_another_model(servers: list[StandIn], tmp_path: Path) -> None:
    """It refuses before the broadcast, keeps its weights and is left out; the other one gets the new weights."""
    save_file({"a": torch.zeros(2, 3), "w": torch.zeros(V)}, tmp_path / "model.safetensors")

    async def story(engine: BroadcastEngine) -> None:
        await engine.load_weights(weights(2.0), 1)
        servers[0].behave(checkpoint=str(tmp_path))
        await engine.load_weights(weights(3.0), 2)
        assert held(servers[0])["sums"] == [pytest.approx({"a": 12.0, "b": float(BIG), "w": 32.0})]
        assert [s["a"] for s in held(servers[1])["sums"]] == [18.0, 18.0]
        assert engine.version == 2 and await versions(engine) == {2}
        assert engine.faults["servers_lost"] == 1

    run(servers, story)


@pytest.mark.parametrize("dying", [0, 1])
def test_server_that_dies_in_the_broadcast(servers: list[StandIn], dying: int) -> None:
    """The group is made anew without it and the living one gets the weights; back again, it gets the next ones too."""
    dead, living = servers[dying], servers[1 - dying]

    async def story(engine: BroadcastEngine) -> None:
        await engine.load_weights(weights(2.0), 1)
        dead.behave(die_in_broadcast=True)
        await engine.load_weights(weights(3.0), 2)
        assert dead.process.wait(LONG) == 9
        assert engine.version == 2 and await versions(engine) == {2}
        assert {s["a"] for s in held(living)["sums"]} == {18.0}
        dead.start()
        await engine.load_weights(weights(4.0), 3)
        for server in servers:
            assert {s["a"] for s in held(server)["sums"]} == {24.0}
        assert engine.version == 3

    run(servers, story)


def test_server_that_hangs(servers: list[StandIn]) -> None:
    """Stopped, not dead: after the time-out the other one has the weights and serves them."""

    async def story(engine: BroadcastEngine) -> None:
        await engine.load_weights(weights(2.0), 1)
        servers[0].signal(signal.SIGSTOP)
        try:
            await engine.load_weights(weights(3.0), 2)
        finally:
            servers[0].signal(signal.SIGCONT)
        assert {s["a"] for s in held(servers[1])["sums"]} == {18.0}
        assert engine.version == 2

    run(servers, story, timeout=15.0)


def test_all_die(servers: list[StandIn]) -> None:
    """The sync waits for one to come back, as a generation does, and then it is done."""

    async def story(engine: BroadcastEngine) -> None:
        await engine.load_weights(weights(2.0), 1)
        for server in servers:
            server.behave(die_in_broadcast=True)
        loading = asyncio.create_task(engine.load_weights(weights(3.0), 2))
        while any(server.up for server in engine.pool.servers):
            await asyncio.sleep(0.05)
        servers[0].start()
        await loading
        assert await versions(engine) == {2}
        assert held(servers[0])["sums"][0]["a"] == 18.0

    run(servers, story)


def test_decisions_of_a_step() -> None:
    """A worker goes on when it is told to, and not where the step is stopped or nobody says anything."""
    store = torch.distributed.HashStore()
    trainer, worker = (WeightGroup(store, "g", rank, 2, 0.2) for rank in (0, 1))
    assert trainer.reports(CONNECT) == {}
    worker.report(CONNECT)
    worker.report("other", "no")
    assert (trainer.reports(CONNECT), trainer.reports("other")) == ({1: ""}, {1: "no"})
    trainer.decide(CONNECT, GO)
    worker.await_decision(CONNECT)
    trainer.decide("other", STOP)
    for step in ("other", "forgotten"):
        with pytest.raises(RuntimeError, match=f"the trainer gave up {step}"):
            worker.await_decision(step)


def test_nobody_waits_for_a_group_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its destructor may take until the time-out: it must not run where `abort` was called, even if its thread is done.

    The closing thread ends before `abort` returns here; the event loop would have waited in its place.
    """
    ended = []

    class Group:
        def abort(self) -> None:
            pass

        def __del__(self) -> None:
            ended.append(threading.current_thread())

    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (start(thread), thread.join()))
    monkeypatch.setattr(platform, "make_process_group", lambda *_: Group())
    group = WeightGroup(torch.distributed.HashStore(), "g", 0, 2, 0.2)
    group.connect()
    group.abort()
    assert len(ended) == 1 and ended[0] is not threading.current_thread()
