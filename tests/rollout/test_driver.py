"""The driver: rollouts beside a training thread, weights under way, what is saved, and every way to end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest
import torch
from doubles import DONE, GET, ScriptedEngine, ScriptedEnvironment, collector, numbers

from nemo_flashrl.engines.base import DrainingEngine
from nemo_flashrl.records import Batch
from nemo_flashrl.rollout.collector import CollectionStopped
from nemo_flashrl.rollout.driver import RolloutDriver
from nemo_flashrl.rollout.metrics import LOSSES

DEADLINE = 60.0  # seconds for what takes milliseconds


@pytest.fixture
def start() -> Iterator[Callable[..., RolloutDriver]]:
    """Drivers of batches of four that are closed whatever happens, and leave no thread."""
    drivers = []

    def start(
        engine: Any = None, make_environment: Any = None, *, lag: int = 0, updates_per_batch: int = 1, **settings: Any
    ) -> RolloutDriver:
        engine = engine or ScriptedEngine(GET)
        make_environment = make_environment or (lambda: ScriptedEnvironment([DONE]))
        settings = {"batch_size": 4, "max_in_flight": 4, **settings}
        driven = collector(engine, make_environment, **settings)
        drivers.append(RolloutDriver(engine, driven, lag=lag, updates_per_batch=updates_per_batch))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.close()
    assert "rollouts" not in [thread.name for thread in threading.enumerate()]


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_batch_is_used_as_often_as_asked(start) -> None:
    """Three steps on each batch: ages 0, 1, 2; its prompts are done with the last. Drops and ends are counted once."""
    driver, seen = start(updates_per_batch=3), []
    for version in range(5):
        driver.load_weights([], version)
        batch = driver.collect(version)
        assert batch.policy_version == version
        seen.append((*numbers(batch), batch.metrics["staleness_max"], batch.metrics["episodes_done"]))
        if version == 2:
            assert driver.state_dict()["prompts"]["unfinished"] == [0, 1, 2, 3]
        driver.trained()
    first, second = (0, 1, 2, 3), (4, 5, 6, 7)
    assert seen == [(*first, 0, 4), (*first, 1, 0), (*first, 2, 0), (*second, 0, 4), (*second, 1, 0)]
    state = driver.state_dict()
    assert (state["prompts"]["unfinished"], state["totals"]) == ([4, 5, 6, 7], {"trajectories_trained": 4})


@pytest.mark.parametrize("lag", [0, 2])
def test_a_prompt_is_finished_when_its_batch_was_trained(start, lag: int) -> None:
    """Two batches of four trained, a third in training, `lag` more collected ahead: 8 prompts are done for good."""
    before = start(lag=lag)
    for version in range(3):
        before.load_weights([], version)
        batch = before.collect(version)
        assert numbers(batch) == [4 * version + i for i in range(4)]
        assert batch.metrics["staleness_max"] == min(version, lag)
        if version < 2:
            before.trained()
    state = json.loads(json.dumps(before.state_dict()))  # plain data
    assert state["prompts"]["position"] == 12 + 4 * lag
    assert state["prompts"]["unfinished"] == list(range(8, 12 + 4 * lag))
    assert state["totals"] == {"trajectories_trained": 8}
    after = start(lag=lag)
    after.load_state_dict(state)
    assert numbers(after.collect(2)) == [8, 9, 10, 11]
    after.trained()
    assert after.state_dict()["totals"] == {"trajectories_trained": 12}
    with pytest.raises(AssertionError, match="no batch is in training"):
        after.trained()


def test_rollouts_go_on_while_the_trainer_trains_and_wait_for_it_at_last(start) -> None:
    """Six in flight, batches of four: before the trainer asks again 4 to 4 + 6 wait for it; what was in flight, queued
    and in training when the state was saved comes first after a resume."""
    driver = start(max_in_flight=6, streaming=True)
    ended = driver.collector._count_ended
    batch = driver.collect(0)
    until(lambda: ended() >= 4 and not driver.collector._running)
    time.sleep(0.05)
    assert 4 <= ended() <= 10
    state = driver.state_dict()["prompts"]
    assert state["unfinished"] == list(range(state["position"]))
    driver.trained()
    unfinished = driver.state_dict()["prompts"]["unfinished"]
    assert unfinished == sorted(set(range(state["position"])) - set(numbers(batch)))
    following = driver.collect(1)
    assert set(numbers(following)) <= set(unfinished)
    assert following.metrics["queue_depth"] == state["position"] - 8 - following.metrics["episodes_in_flight"]
    assert following.metrics["rollout_idle_seconds_during_training"] >= 0.05
    assert following.metrics["staleness_1"] == 1.0
    assert following.metrics["total_trajectories_trained"] == 4
    resumed = start(max_in_flight=6, streaming=True)
    resumed.load_state_dict({"prompts": {**state, "unfinished": unfinished}, "totals": {}})
    assert set(numbers(resumed.collect(1))) <= set(unfinished)


def test_groups_are_bounded_too(start) -> None:
    """Groups of 2 and 3 slots: at most 4 + 2 x 3 trajectories are finished and not handed over."""
    driver = start(max_in_flight=3, streaming=True, group_size=2)
    for version in range(5):
        batch = driver.collect(version)
        assert [n for n, m in zip(numbers(batch)[::2], numbers(batch)[1::2], strict=True) if n != m] == []
        driver.trained()
        until(lambda: not driver.collector._running)
        assert 4 <= driver.collector._count_ended() <= 10


def test_faults_of_a_step(start) -> None:
    """What a caller gets is new since its last call, through an engine around the engine too."""
    inner = ScriptedEngine(GET)
    driver = start(DrainingEngine(inner))
    none = dict.fromkeys(LOSSES, 0)
    assert driver.faults() == none | {"rollout_faults": 0}
    inner.faults.update({"servers_lost": 1, "dead": 3, "sync_probe": 2})
    assert driver.faults() == none | {
        "servers_lost": 1,
        "rollout_faults": 5,
        "rollout_faults_dead": 3,
        "rollout_faults_sync_probe": 2,
    }
    inner.faults["dead"] += 4
    assert driver.faults() == none | {"rollout_faults": 4, "rollout_faults_dead": 4}


class SlowEngine(ScriptedEngine):
    """Tokens of an action come at a word from outside, each with the version of that moment."""

    def __init__(self) -> None:
        super().__init__(GET)
        self.asked = self.loads = 0
        self.gate = threading.Event()

    async def generate(self, token_ids: Any, sampling: Any) -> Any:
        self.asked += 1
        first = self.version
        while not self.gate.is_set():
            await asyncio.sleep(0.001)
        answer = await super().generate(token_ids, sampling)
        return type(answer)(answer.token_ids, answer.logprobs, (first, *answer.versions[1:]), answer.finish_reason)

    async def load_weights(self, stream: Any, version: int) -> None:
        self.names = [name for name, _ in stream]
        self.loads += 1
        self.version = version


@pytest.mark.parametrize("drain", [False, True])
def test_weights_replaced_with_actions_in_flight(start, drain: bool) -> None:
    """Without draining the load returns while all four actions wait, and they are of two versions; with it, it does not
    begin before they have ended, an action that comes meanwhile waits, and none is of two versions."""
    inner = SlowEngine()
    engine = DrainingEngine(inner) if drain else inner

    def make() -> ScriptedEnvironment:
        return ScriptedEnvironment([type(DONE)("> k 4 0"), DONE])

    driver = start(engine, make, streaming=True)
    batches: list[Batch] = []
    trainer = threading.Thread(target=lambda: batches.append(driver.collect(0)))
    trainer.start()
    until(lambda: inner.asked == 4)
    walked = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "ab":
            walked.append((name, threading.current_thread()))
            yield name, torch.zeros(1)

    loader = threading.Thread(target=lambda: driver.load_weights(stream(), 1))
    loader.start()
    if drain:
        time.sleep(0.05)
        assert (inner.loads, walked) == (0, [])
    else:
        loader.join(DEADLINE)
        assert inner.loads == 1
    inner.gate.set()
    for thread in (loader, trainer):
        thread.join(DEADLINE)
        assert not thread.is_alive()
    assert inner.names == ["a", "b"]
    assert {thread for _, thread in walked} == {loader}  # collectives stay in the caller's thread
    versions = {tuple(t.versions[t.action_mask].tolist()) for t in batches[0].trajectories}
    assert versions == {(0,) * 6 + (1,) * 6} if drain else {(0,) + (1,) * 11}


def test_a_stream_or_an_engine_that_breaks_off(start) -> None:
    """Both threads learn of it, whoever it was; the next load works."""
    engine = SlowEngine()
    driver = start(engine)

    def torn(error: BaseException) -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(1)
        raise error

    for error in (ConnectionError("a rank is gone"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            driver.load_weights(torn(error), 1)
    assert engine.version == 0

    async def refuse(stream: Any, version: int) -> None:
        next(iter(stream))
        raise ValueError("weights: the model has no tensor named a")

    engine.load_weights, load = refuse, engine.load_weights
    rest = torn(AssertionError("walked further than the engine asked"))
    with pytest.raises(ValueError, match="no tensor named a"):
        driver.load_weights(rest, 1)
    engine.load_weights = load
    driver.load_weights([("a", torch.zeros(1))], 1)
    assert engine.version == 1


@pytest.mark.parametrize("asked", ["before", "meanwhile"])
def test_a_stop_ends_what_waits_for_servers(start, monkeypatch, asked: str) -> None:
    """A weight sync and an evaluation: neither fails, and the rest of the stream is left to the caller."""
    monkeypatch.setattr("nemo_flashrl.rollout.driver.STOP_SECONDS", 0.05)
    engine = ScriptedEngine(GET)

    async def waits(stream: Any, version: int) -> None:
        next(iter(stream))
        await asyncio.sleep(DEADLINE)

    engine.load_weights = waits
    driver = start(engine)
    if asked == "before":
        driver.stop_collecting()
    else:
        threading.Timer(0.2, driver.stop_collecting).start()
    started, stream = time.monotonic(), iter([("a", torch.zeros(1)), ("b", torch.zeros(1))])
    driver.load_weights(stream, 1)
    assert driver.use(lambda engine: asyncio.sleep(DEADLINE)) is None
    assert time.monotonic() - started < DEADLINE / 2
    assert next(stream)[0] == "b"
    with pytest.raises(CollectionStopped):
        driver.collect(0)


def test_a_cancelled_load_leaves_no_thread_waiting(start, monkeypatch) -> None:
    """The loader's thread asks for a tensor that will not come."""
    monkeypatch.setattr("nemo_flashrl.rollout.driver.STOP_SECONDS", 0.05)
    engine, told = ScriptedEngine(GET), threading.Event()

    def walk(stream: Any) -> None:
        with pytest.raises(RuntimeError, match="no more is wanted"):
            for _ in stream:
                told.wait(1)  # beyond the stop
        told.set()

    engine.load_weights = lambda stream, version: asyncio.to_thread(walk, stream)
    driver = start(engine)
    driver.stop_collecting()
    driver.load_weights((("a", torch.zeros(1)) for _ in range(9)), 1)
    assert told.wait(DEADLINE)


class ByMistake(ScriptedEngine):
    """Fails after some requests."""

    def __init__(self, sound: int) -> None:
        super().__init__(GET)
        self.sound = sound

    async def generate(self, token_ids: Any, sampling: Any) -> Any:
        if len(self.requests) >= self.sound:
            raise ConnectionError("no server left")
        return await super().generate(token_ids, sampling)


@pytest.mark.parametrize("while_training", [False, True])
def test_an_engine_that_fails_stops_the_run(start, while_training: bool) -> None:
    """Between two batches as well: the trainer's next call raises what happened meanwhile. Six begin at first, six when
    those have ended and four of them are handed over, and of these the last fails."""
    slots = {"max_in_flight": 6, "streaming": True} if while_training else {}
    engine = ByMistake(11 if while_training else 5)
    driver = start(engine, lambda: ScriptedEnvironment([0.05, DONE]), **slots)
    driver.collect(0)
    if while_training:
        until(lambda: driver.collector._failure)
    with pytest.raises(ConnectionError, match="no server left"):
        driver.collect(1)


def test_an_engine_that_ends_the_process_ends_the_run_instead(start) -> None:
    """sys.exit(0) of a library would end the loop's thread without a word and leave the trainer waiting."""

    class Exits(ScriptedEngine):
        async def generate(self, token_ids: Any, sampling: Any) -> Any:
            sys.exit(0)

    driver = start(Exits(GET))
    for call in (lambda: driver.collect(0), lambda: driver.load_weights([("a", torch.zeros(1))], 1)):
        with pytest.raises(RuntimeError, match=r"event loop was interrupted by SystemExit\(0\)"):
            call()


def collect_in_vain(driver: RolloutDriver) -> None:
    with contextlib.suppress(RuntimeError, CancelledError):
        driver.collect(0)


def end_what_was_left_behind(driver: RolloutDriver) -> None:
    """Here, and not by a garbage collection in the middle of another test."""
    until(lambda: not driver._thread.is_alive())
    tasks = asyncio.all_tasks(driver._loop)
    for task in tasks:
        task.cancel()
    driver._loop.run_until_complete(asyncio.wait(tasks))
    driver._loop.close()


def test_what_hangs_does_not_keep_the_run_from_ending(start, monkeypatch, capsys) -> None:
    """An environment that never answers, its close neither, and one that blocks the thread for good."""
    monkeypatch.setattr("nemo_flashrl.rollout.driver.CLOSE_SECONDS", 0.2)
    closed = []

    class Hangs(ScriptedEnvironment):
        async def step(self, action: str) -> Any:
            await asyncio.sleep(1000)

        async def close(self) -> None:
            closed.append(self)
            await asyncio.sleep(1000)

    driver = start(make_environment=lambda: Hangs([]), streaming=True)
    asked = threading.Thread(target=collect_in_vain, args=(driver,), daemon=True)
    asked.start()
    until(lambda: len(driver.engine.requests) == 4)
    started = time.monotonic()
    driver.close()
    assert time.monotonic() - started < DEADLINE
    assert len(closed) == 4

    release = threading.Event()

    class Blocks(ScriptedEnvironment):
        async def step(self, action: str) -> Any:
            release.wait(DEADLINE)
            return DONE

    driver = start(make_environment=lambda: Blocks([]))
    asked = threading.Thread(target=collect_in_vain, args=(driver,), daemon=True)
    asked.start()
    until(lambda: driver.engine.requests)
    driver.close()
    assert "blocks the rollout thread; abandoning it" in capsys.readouterr().err
    release.set()
    end_what_was_left_behind(driver)


def test_a_blocked_loop_does_not_keep_collect_from_being_stopped(start, monkeypatch, capsys) -> None:
    """What is saved then is the state after the last finished batch: its prompts are spent, no others begun."""
    for name in ("STOP_SECONDS", "CLOSE_SECONDS"):
        monkeypatch.setattr(f"nemo_flashrl.rollout.driver.{name}", 0.2)
    release, blocked, order, raised = threading.Event(), threading.Event(), iter(range(100)), []

    class Blocks(ScriptedEnvironment):
        async def step(self, action: str) -> Any:
            if next(order) >= 4:
                blocked.set()
                release.wait(DEADLINE)
            return DONE

    driver = start(make_environment=lambda: Blocks([]))
    driver.collect(0)
    driver.trained()
    finished = driver.state_dict()

    def collect() -> None:
        try:
            driver.collect(1)
        except CollectionStopped as error:
            raised.append(error)

    asked = threading.Thread(target=collect, daemon=True)
    asked.start()
    assert blocked.wait(DEADLINE)
    driver.stop_collecting()
    asked.join(DEADLINE)
    assert len(raised) == 1
    assert driver.state_dict() == finished
    assert finished["prompts"]["unfinished"] == []
    driver.close()
    assert "blocks the rollout thread; abandoning it" in capsys.readouterr().err
    release.set()
    end_what_was_left_behind(driver)
