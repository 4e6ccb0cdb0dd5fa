"""Rollout workers: real processes that play against a server, are killed, blocked, and replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doubles import TOKENIZER
from server_processes import StandIn, anew, ended_after
from stand_in_server import START, V
from unruly_environment import Unruly

from nemo_flashrl.config.schema import RunConfig
from nemo_flashrl.records import Batch, Sampling, Trajectory
from nemo_flashrl.rollout import from_config, worker_pool
from nemo_flashrl.rollout.collector import Collector
from nemo_flashrl.rollout.worker_pool import WorkerPool

LONG = 120.0  # seconds that nothing here comes near
SAMPLING = Sampling(max_tokens=6, temperature=0.7)


@pytest.fixture(scope="module")
def servers() -> Iterator[list[StandIn]]:
    yield from ended_after([StandIn()])


@pytest.fixture
def server(servers: list[StandIn]) -> StandIn:
    return anew(servers)[0]


def configured(server: StandIn, folder: Path, deeds: list[str], **rollout: Any) -> RunConfig:
    config = RunConfig()
    config.model.path, config.model.context_length = str(folder), 256
    config.environment.name = "unruly_environment.Unruly"
    config.environment.settings = {"folder": str(folder), "deeds": deeds}
    config.rollout.engine, config.rollout.servers, config.rollout.server_timeout = "vllm", [server.url], LONG
    for name, value in rollout.items():
        setattr(config.rollout, name, value)
    return config


def run(config: RunConfig, use: Callable[[WorkerPool], Coroutine[Any, Any, Any]]) -> Any:
    """What `use` makes of the workers of a configuration; no process is left."""

    async def all_of() -> Any:
        pool = from_config.start_workers(config, TOKENIZER, V)
        try:
            return await asyncio.wait_for(use(pool), LONG)
        finally:
            pids = [pool._factory.pid(worker.index) for worker in pool._workers]
            begun = time.monotonic()
            await pool.close()
            assert time.monotonic() - begun < 6
            assert not [pid for pid in filter(None, pids) if os.path.exists(f"/proc/{pid}")]

    return asyncio.run(all_of())


async def play_all(pool: WorkerPool, count: int) -> list[Trajectory]:
    return await asyncio.gather(*(pool.play(index, index, 0, SAMPLING) for index in range(count)))


def fields(trajectory: Trajectory) -> dict[str, Any]:
    """Comparable."""
    whole = {name: getattr(trajectory, name) for name in Trajectory.__dataclass_fields__}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in whole.items()}


def begun(folder: Path, task: int) -> list[int]:
    """The processes in which episodes of a task have begun."""
    return [int(line) for line in (folder / f"begun-{task}").read_text().split()]


def test_one_two_and_four_workers_make_the_same_batches(server: StandIn, tmp_path: Path) -> None:
    def batches(workers: int) -> list[dict[str, Any]]:
        folder = tmp_path / str(workers)
        folder.mkdir()
        config = configured(server, folder, ["none"] * 12, workers=workers)

        async def collect(pool: WorkerPool) -> list[Batch]:
            sizes = {"batch_size": 8, "group_size": 2, "seed": 3}
            source = [None] * 12
            collector = Collector(pool, None, source, TOKENIZER, sampling=SAMPLING, play=pool.play, **sizes)
            return [await collector.collect(0), await collector.collect(0)]

        return [fields(trajectory) for batch in run(config, collect) for trajectory in batch.trajectories]

    one, two, four = batches(1), batches(2), batches(4)
    assert one == two == four
    assert len({tuple(trajectory["token_ids"]) for trajectory in one}) == 16
    assert all(trajectory["turns"] == 3 and trajectory["info"]["said"] for trajectory in one)
    table = START / 0.7 - np.log(np.exp(START / 0.7).sum())
    for trajectory in one:
        expected = np.where(trajectory["action_mask"], table[trajectory["token_ids"]], 0.0)
        assert np.allclose(trajectory["behavior_logprobs"], expected, atol=1e-5)


def test_a_killed_worker_loses_nothing(server: StandIn, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    server.behave(seconds=0.3)
    config = configured(server, tmp_path, ["none"] * 8, workers=2)

    async def play(pool: WorkerPool) -> tuple[list[Trajectory], list[Trajectory]]:
        await play_all(pool, 2)
        playing = asyncio.create_task(play_all(pool, 8))
        await asyncio.sleep(0.5)
        os.kill(pool._factory.pid(pool._workers[0].index), signal.SIGKILL)
        broken = await playing
        assert pool.faults["workers_lost"] == 1 and pool.faults["episodes_restarted"] == 4
        assert len(pool._workers) == 2
        return broken, await play_all(pool, 8)

    broken, whole = run(config, play)
    assert [fields(t) for t in broken] == [fields(t) for t in whole]
    assert "rollout worker 0 is lost, 4 episodes begin anew: ended by signal 9" in capfd.readouterr().err


@pytest.mark.parametrize("deed", ["sleep", "hold the GIL"])
def test_an_episode_that_blocks_holds_up_its_worker_alone(
    deed: str, server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that lets other threads run is named by its worker; who holds the GIL is known by its losses alone."""
    monkeypatch.setattr(worker_pool, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(worker_pool, "MOST_LOST", 2)
    config = configured(server, tmp_path, [deed, "none"], workers=1, step_timeout=2.0)

    async def play(pool: WorkerPool) -> tuple[list[Trajectory], float]:
        await pool.play(1, 1, 1, SAMPLING)
        begun = time.monotonic()
        failed = await pool.play(0, 0, 0, SAMPLING)
        return [failed, await pool.play(1, 1, 0, SAMPLING)], time.monotonic() - begun

    (failed, other), seconds = run(config, play)
    assert (failed.end_reason, other.end_reason) == ("environment_error", "done")
    assert ("blocked it for" if deed == "sleep" else "no sign of life") in failed.info["error"]
    assert len(begun(tmp_path, 0)) == (1 if deed == "sleep" else 2)


def test_an_episode_that_ends_its_process(server: StandIn, tmp_path: Path) -> None:
    """Once, by an accident: it is played again. Whenever it is played: it fails, and no other does."""
    config = configured(server, tmp_path, ["exit once", "exit", "none"], workers=1)

    async def play(pool: WorkerPool) -> tuple[list[Trajectory], int]:
        first, second = await pool.play(0, 0, 0, SAMPLING), await pool.play(1, 1, 0, SAMPLING)
        return [first, second, await pool.play(2, 2, 0, SAMPLING)], pool.faults["workers_lost"]

    (first, second, third), lost = run(config, play)
    assert [first.end_reason, second.end_reason, third.end_reason] == ["done", "environment_error", "done"]
    assert not second.action_count and "lost: ended by signal 9" in second.info["error"]
    assert (len(begun(tmp_path, 0)), len(begun(tmp_path, 1)), lost) == (2, 3, 4)


def test_workers_end_with_the_trainer_however_that_ends(server: StandIn, tmp_path: Path) -> None:
    """Killed while one episode blocks its worker's thread."""
    script = """
import asyncio, sys
from pathlib import Path
from test_workers import SAMPLING, configured, from_config
from doubles import TOKENIZER

class Told:
    url = sys.argv[1]

async def play():
    pool = from_config.start_workers(configured(Told, Path(sys.argv[2]), ["sleep", "none"], workers=2), TOKENIZER, 32)
    print(pool._factory._process.pid, flush=True)
    await pool.play(0, 0, 0, SAMPLING)

asyncio.run(play())
"""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    trainer = subprocess.Popen(
        [sys.executable, "-c", script, server.url, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    factory = int(trainer.stdout.readline())
    deadline = time.monotonic() + LONG
    while not (tmp_path / "begun-0").exists():
        assert time.monotonic() < deadline and trainer.poll() is None
        time.sleep(0.1)
    (worker,) = begun(tmp_path, 0)
    trainer.kill()
    trainer.wait()
    while any(os.path.exists(f"/proc/{pid}") for pid in (factory, worker)):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_worker_that_leaks_is_replaced(server: StandIn, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    server.behave(seconds=0.5)
    config = configured(server, tmp_path, ["leak", "none"], workers=1, worker_max_memory=0.5)

    async def play(pool: WorkerPool) -> list[Trajectory]:
        first = pool._workers[0]
        ended = await play_all(pool, 2)
        while first in pool._workers or not pool._workers[0].ready:
            await asyncio.sleep(0.1)
        return [*ended, await pool.play(1, 1, 0, SAMPLING)]

    assert [t.end_reason for t in run(config, play)] == ["done"] * 3
    assert len(set(begun(tmp_path, 1))) == 2
    assert "is replaced once its episodes have ended" in capfd.readouterr().err


def test_new_weights_wait_for_requests_in_all_workers(server: StandIn, tmp_path: Path) -> None:
    """async: an action is of one version; none is sampled while weights are loaded."""
    server.behave(seconds=0.3)
    config = configured(server, tmp_path, ["none"] * 6, workers=2, mode="async")

    async def play(pool: WorkerPool) -> list[Trajectory]:
        await pool.load_weights([("w", torch.ones(V))], 1)  # before anything is played, as a resumed run does
        await play_all(pool, 2)
        playing = asyncio.create_task(play_all(pool, 6))
        await asyncio.sleep(0.5)
        await pool.load_weights([("w", torch.linspace(0, 1, V))], 2)
        return await playing

    second = np.linspace(0, 1, V) / SAMPLING.temperature
    for trajectory in run(config, play):
        acted = trajectory.action_mask
        versions, told = trajectory.versions[acted], trajectory.behavior_logprobs[acted]
        assert versions.tolist() == sorted(versions) and set(versions) == {1, 2}
        table = second - np.log(np.exp(second).sum())
        assert np.allclose(told, np.where(versions == 2, table[trajectory.token_ids[acted]], -np.log(V)), atol=1e-5)
        for places in trajectory.turn_places:
            assert len(set(trajectory.versions[places])) == 1


def test_a_server_that_begins_anew_gets_the_weights(server: StandIn, tmp_path: Path) -> None:
    config = configured(server, tmp_path, ["none"] * 6, workers=2)

    async def play(pool: WorkerPool) -> list[Trajectory]:
        await play_all(pool, 2)
        await pool.load_weights([("w", torch.zeros(V))], 1)
        server.behave(begin_anew=True)  # as a restart: the weights of its command line
        ended = await play_all(pool, 6)
        assert pool.faults["version"] and pool.faults["servers_lost"] == 1
        return ended

    for trajectory in run(config, play):
        assert set(trajectory.versions[trajectory.action_mask]) == {1}


def test_held_out_tasks_and_prompts_without_room(server: StandIn, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """The workers play the held-out settings' tasks, and the trainer is told of a prompt that leaves no room."""
    other = tmp_path / "held_out"
    other.mkdir()
    config = configured(server, tmp_path, ["none"], workers=2)
    config.evaluation.every_steps, config.evaluation.samples, config.evaluation.tasks = 1, 2, 3
    config.evaluation.settings = {"folder": str(other), "deeds": ["none"] * 4}
    config.batching.on_too_long = "drop"
    held_out = from_config.held_out(config, Unruly, TOKENIZER)

    async def play(pool: WorkerPool) -> tuple[list[Trajectory], Trajectory]:
        return await held_out(pool), await pool.play(0, 0, 0, SAMPLING)

    played, trained = run(config, play)
    assert [t.prompt_index for t in played] == [0, 0, 1, 1, 2, 2]
    assert sorted(path.name for path in other.iterdir()) == ["begun-0", "begun-1", "begun-2"]
    assert len({tuple(t.token_ids) for t in played}) == 6 and trained.end_reason == "done"

    config.model.context_length, config.evaluation.every_steps = 6, 0  # the prompt has 5 tokens, of 6 a tenth is kept
    assert run(config, lambda pool: pool.play(0, 0, 0, SAMPLING)).end_reason == "prompt_too_long"
    assert "the prompt of task 0 has 5 tokens and leaves no room" in capfd.readouterr().err
    config.batching.on_too_long = "error"
    with pytest.raises(ValueError, match="of task 0 has 5 tokens .* or set batching.on_too_long=drop$"):
        run(config, lambda pool: pool.play(0, 0, 0, SAMPLING))


def test_what_a_worker_cannot_make_is_told(server: StandIn, tmp_path: Path) -> None:
    config = configured(server, tmp_path, [], workers=2)
    with pytest.raises(ValueError, match="there are no tasks"):
        run(config, lambda pool: pool.play(0, 0, 0, SAMPLING))


def test_what_an_episode_raises_ends_the_run(server: StandIn, tmp_path: Path) -> None:
    config = configured(server, tmp_path, ["none"], workers=1)

    async def play(pool: WorkerPool) -> None:
        await pool.play(0, 0, 0, SAMPLING)
        server.behave(nonsense="status")
        await pool.play(0, 0, 1, SAMPLING)

    with pytest.raises(RuntimeError, match="a generation failed 4 times"):
        run(config, play)
