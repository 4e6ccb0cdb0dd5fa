"""The collector: streaming, groups, drops, faults, resume, determinism."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles import (
    DONE,
    GET,
    TOKENIZER,
    ScriptedEngine,
    ScriptedEnvironment,
    TornTasks,
    collector,
    numbers,
    player,
)
from tiny import random_trajectories

from nemo_flashrl.engines import TransformersEngine
from nemo_flashrl.environments.environment import StepResult
from nemo_flashrl.environments.key_value_store import KeyValueStore, Settings
from nemo_flashrl.records import Batch, Sampling
from nemo_flashrl.rollout.collector import Collector
from nemo_flashrl.rollout.episode import Limits
from nemo_flashrl.rollout.groups import LongPrompts, Siblings, SlotClock
from nemo_flashrl.rollout.prompts import PromptStream


def test_prompts_sampling_and_episodes_in_flight_may_be_left_out() -> None:
    sampling = Sampling(stop_token_ids=(TOKENIZER.eos_token_id,))
    usual = {"prompts": PromptStream(7, seed=3), "sampling": sampling, "max_in_flight": 4}
    collectors = [
        Collector(
            ScriptedEngine(GET), lambda: ScriptedEnvironment([DONE]), range(7), TOKENIZER, batch_size=4, seed=3, **more
        )
        for more in (usual, {})
    ]
    said, left_out = ([asyncio.run(source.collect(0)).trajectories, source.state_dict()] for source in collectors)
    assert collectors[0].sampling == collectors[1].sampling
    assert [t.token_ids.tolist() for t in said[0]] == [t.token_ids.tolist() for t in left_out[0]]
    assert said[1] == left_out[1]


@pytest.mark.parametrize("in_flight", [4, 2])
def test_synchronous_mode_leaves_nothing_behind(in_flight: int) -> None:
    """Nothing runs between two batches, so every token of a batch is of the version that it was asked of."""
    engine = ScriptedEngine(GET)
    source = collector(engine, batch_size=4, max_in_flight=in_flight)

    async def run() -> None:
        for version in range(3):
            engine.version = version
            batch = await source.collect(version)
            assert numbers(batch) == [4 * version + i for i in range(4)]
            assert batch.policy_version == version
            assert batch.metrics["staleness_max"] == 0
            assert len(asyncio.all_tasks()) == 1
            await asyncio.sleep(0.01)
            assert len(engine.requests) == 4 * (version + 1)

    asyncio.run(run())


def test_a_task_that_cannot_be_read_is_one_failed_episode(capsys) -> None:
    """It has no token to learn from and is dropped, counted and told; the next epoch's first prompt takes its place."""
    source = collector(ScriptedEngine(GET), tasks=TornTasks(range(12)), batch_size=12, max_in_flight=1)
    batch = asyncio.run(source.collect(0))
    assert (batch.metrics["episodes_environment_error"], batch.metrics["dropped_empty"]) == (1, 1)
    assert len({*range(13)} - {*numbers(batch)}) == 1
    said = (
        r"failed and is dropped: tasks\[9\]: OSError: page 9 is torn \(\S+doubles\.py:\d+\); counted in dropped_empty"
    )
    assert re.search(said, capsys.readouterr().err)


def test_a_service_that_is_down_for_a_while_costs_few_prompts(capsys) -> None:
    """Each `reset` fails for 1.5 s; without backoff, thousands would have failed by then and ended the run."""
    back: list[float] = []

    class Down(ScriptedEnvironment):
        async def reset(self, task: Any) -> Any:
            now = asyncio.get_running_loop().time()
            if now < (back or back.append(now + 1.5) or back)[0]:
                raise ConnectionError(f"no service for task {task}")
            return await super().reset(task)

    source = collector(ScriptedEngine(GET), lambda: Down([DONE]), batch_size=8, max_in_flight=4)
    batch = asyncio.run(source.collect(0))
    assert len(batch.trajectories) == 8
    assert 8 < batch.metrics["dropped_empty"] < 30
    assert capsys.readouterr().err.count("no service for task") == 1


def test_a_straggler_does_not_hold_up_the_batch() -> None:
    """Episode 1 hangs; with one spare in flight, three batches of four come without it, and it is kept."""
    order = iter(range(100))

    def make() -> ScriptedEnvironment:
        return ScriptedEnvironment([1000.0, DONE] if next(order) == 1 else [DONE])

    async def run(spare: int, seconds: float) -> list[int]:
        source = collector(ScriptedEngine(GET), make, batch_size=4, max_in_flight=4 + spare, streaming=spare > 0)
        try:
            batches = [await asyncio.wait_for(source.collect(v), seconds) for v in range(3)]
            assert source.state_dict()["prompts"]["unfinished"][0] == 0  # nothing was trained
            for batch in batches:
                source.trained(batch)
            assert source.state_dict()["prompts"]["unfinished"][0] == 1
            return [n for batch in batches for n in numbers(batch)]
        finally:
            await source.close()

    collected = asyncio.run(run(spare=1, seconds=60.0))
    assert len(set(collected)) == 12
    assert 1 not in collected
    order = iter(range(100))
    with pytest.raises(TimeoutError):  # the barrier that the spare slot does away with
        asyncio.run(run(spare=0, seconds=2.0))


def test_streaming_keeps_the_places_filled() -> None:
    """Ten slots, batches of four: one ends, the next begins, until a whole batch waits for a trainer that is slow."""
    gates: list[asyncio.Event] = []
    running = Counter()

    class Gated(ScriptedEnvironment):
        async def step(self, action: str) -> StepResult:
            running["now"] += 1
            gates.append(asyncio.Event())
            await gates[-1].wait()
            running["now"] -= 1
            return DONE

    async def settle() -> None:
        for _ in range(50):
            await asyncio.sleep(0)

    async def run() -> None:
        source = collector(ScriptedEngine(GET), lambda: Gated([]), batch_size=4, max_in_flight=10, streaming=True)
        collecting = asyncio.create_task(source.collect(0))
        seen = []
        for place in range(10):
            await settle()
            seen.append((running["now"], len(gates), collecting.done()))
            gates[place].set()
        # By hand: four endings make the batch, four more fill the next one, and only then no episode takes their slot.
        assert seen[:5] == [(10, 10, False), (10, 11, False), (10, 12, False), (10, 13, False), (10, 14, True)]
        assert seen[5:] == [(10, 15, True), (10, 16, True), (10, 17, True), (9, 17, True), (8, 17, True)]
        assert numbers(collecting.result()) == [0, 1, 2, 3]
        assert numbers(await source.collect(1)) == [4, 5, 6, 7]
        await settle()
        assert (running["now"], len(gates)) == (10, 20)
        await source.close()

    asyncio.run(run())


def test_groups_are_whole() -> None:
    engine = ScriptedEngine(GET)
    source = collector(engine, batch_size=6, group_size=3, max_in_flight=6)
    batch = asyncio.run(source.collect(0))
    assert numbers(batch) == [0, 0, 0, 1, 1, 1]
    assert batch.metrics["group_wait_seconds"] >= 0
    assert [t.group for t in batch.trajectories] == numbers(batch)
    assert len({sampling.seed for _, sampling in engine.requests}) == 6
    for settings, message in [
        ({"batch_size": 4, "group_size": 3, "max_in_flight": 4}, "batch_size=4 .* multiple of group_size=3"),
        ({"batch_size": 4, "max_in_flight": 0}, "max_in_flight=0"),
        ({"batch_size": 4, "max_in_flight": 4, "max_staleness": -1}, "max_staleness=-1"),
    ]:
        with pytest.raises(ValueError, match=message):
            collector(engine, **settings)


def test_old_trajectories_are_dropped_and_counted() -> None:
    """Six slots, batches of four, episodes 0 and 1 slow. After the first batch, 2 to 5, the slots hold 0, 1, 6 to 9,
    all of version 0. At version 2 they are too old for max_staleness=1, and 10 to 13 are sampled instead."""

    async def run(max_staleness: int | None) -> list[Batch]:
        order = iter(range(1000))
        engine = ScriptedEngine(GET)
        source = collector(
            engine,
            lambda: ScriptedEnvironment([0.05, DONE] if next(order) < 2 else [DONE]),
            batch_size=4,
            max_in_flight=6,
            streaming=True,
            max_staleness=max_staleness,
        )
        batches = [await source.collect(0)]
        await asyncio.sleep(0.1)
        engine.version = 2
        batches += [await source.collect(2), await source.collect(2)]
        state = source.state_dict()
        assert bool({0, 1} & set(state["prompts"]["unfinished"])) == (max_staleness is None)  # dropped for good
        assert state["totals"] == ({} if max_staleness is None else {"trajectories_dropped_too_old": 6})
        await source.close()
        return batches

    first, second, _ = asyncio.run(run(1))
    assert (numbers(first), numbers(second)) == ([2, 3, 4, 5], [10, 11, 12, 13])
    assert second.metrics["dropped_too_old"] == 6
    assert second.metrics["staleness_max"] == 0
    _, second, third = asyncio.run(run(None))
    assert numbers(second) == [6, 7, 8, 9]
    assert {0, 1} <= set(numbers(third))
    assert second.metrics["staleness_mean"] == second.metrics["staleness_max"] == 2
    assert second.metrics["dropped_too_old"] == 0


def test_empty_episodes_are_dropped_and_never_waited_for() -> None:
    order = iter(range(1000))

    def make() -> ScriptedEnvironment:
        return ScriptedEnvironment([DONE], prompt=OSError("down") if next(order) % 2 else "Q k 2 9 :")

    batch = asyncio.run(collector(ScriptedEngine(GET), make, batch_size=4, max_in_flight=4).collect(0))
    assert numbers(batch) == [0, 2, 4, 6]
    assert batch.metrics["dropped_empty"] == batch.metrics["episodes_environment_error"] == 3
    always = collector(
        ScriptedEngine(GET), lambda: ScriptedEnvironment([], prompt=OSError("down")), batch_size=4, max_in_flight=4
    )
    with pytest.raises(
        ValueError,
        match=r"^21 traj.* none was usable \(21 empty\).*last error: reset: OSError: down \(\S+doubles\.py:\d+\)$",
    ):
        asyncio.run(always.collect(0))


def test_a_constructor_that_fails_ends_its_episode_alone() -> None:
    order = iter(range(1000))

    def make() -> ScriptedEnvironment:
        return ScriptedEnvironment([DONE]) if next(order) else 1 / 0

    batch = asyncio.run(collector(ScriptedEngine(GET), make, batch_size=4, max_in_flight=4).collect(0))
    assert numbers(batch) == [1, 2, 3, 4]
    always = collector(ScriptedEngine(GET), lambda: 1 / 0, batch_size=1, max_in_flight=1)
    with pytest.raises(ValueError, match=r"last error: __init__: ZeroDivisionError: division by zero \(\S+:\d+\)$"):
        asyncio.run(always.collect(0))


class Lengthy(ScriptedEnvironment):
    """Odd tasks have prompts of 500 tokens."""

    async def reset(self, task: int) -> Any:
        self.prompt = "k " * 500 if task % 2 else "Q k 2 9 :"
        return await super().reset(task)


@pytest.mark.parametrize("on_too_long", ["drop", "truncate"])
def test_a_prompt_without_room_is_left_out_counted_and_told_of_once(on_too_long: str, capsys) -> None:
    source = collector(ScriptedEngine(GET), lambda: Lengthy([DONE]), batch_size=4, max_in_flight=4, group_size=2)
    tell = LongPrompts("my.Lengthy", 142, 0.1, on_too_long)
    player(source)._limits = replace(player(source)._limits, on_long_prompt=tell)
    batch = asyncio.run(source.collect(0))
    tasks = [PromptStream(1000).task_index(index) for index in range(max(numbers(batch)) + 1)]
    even = [index for index, task in enumerate(tasks) if task % 2 == 0]
    assert len(even) == 2 and len(tasks) > 2
    assert numbers(batch) == [even[0], even[0], even[1], even[1]]
    metrics = batch.metrics
    assert metrics["dropped_prompt_too_long"] == metrics["episodes_prompt_too_long"] == 2 * (len(tasks) - 2)
    first = next(task for task in tasks if task % 2)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"environment.name='my.Lengthy': the prompt of task {first} has 500 tokens" in said
    assert "model.context_length=142" in said and "batching.context_margin=0.1" in said


def test_prompts_without_room_end_the_run_as_errors_or_in_a_row() -> None:
    def source(on_too_long: str) -> Collector:
        made = collector(ScriptedEngine(GET), lambda: Lengthy([DONE]), tasks=[1], batch_size=1, max_in_flight=1)
        player(made)._limits = replace(
            player(made)._limits, on_long_prompt=LongPrompts("my.Lengthy", 142, 0.1, on_too_long)
        )
        return made

    with pytest.raises(ValueError, match="of task 0 has 500 tokens .* or set batching.on_too_long=drop$"):
        asyncio.run(source("error").collect(0))
    with pytest.raises(ValueError, match=r"none was usable \(6 prompt_too_long\).*a prompt of 500 tokens .* in 128$"):
        asyncio.run(source("drop").collect(0))


def test_metrics_by_hand() -> None:
    """Two turns of 6 action tokens after a prompt of 5, 4 observed and 3 of a mark between: 12 of 24."""
    results = [StepResult("> k 4 0 7 7 7"), DONE]
    source = collector(ScriptedEngine(GET), lambda: ScriptedEnvironment(list(results)), batch_size=2, max_in_flight=2)
    player(source)._limits = Limits(max_observation_tokens=4)
    metrics = asyncio.run(source.collect(3)).metrics
    assert metrics["action_token_share"] == pytest.approx(12 / 24)
    assert metrics["turns"] == 2
    assert metrics["observations_truncated"] == 2
    assert metrics["staleness_mean"] == metrics["staleness_max"] == 3
    assert [metrics[f"staleness_{age}"] for age in ("0", "1", "2_3", "4_7", "8_up")] == [0, 0, 1, 0, 0]
    assert (metrics["queue_depth"], metrics["episodes_in_flight"]) == (0, 0)
    assert (metrics["episodes_done"], metrics["episodes_turn_limit"], metrics["dropped_too_old"]) == (2, 0, 0)
    rate = 24 / metrics["rollout_seconds"]
    assert metrics["rollout_tokens_per_second"] == pytest.approx(rate)


def test_idle_slots_by_hand() -> None:
    """Four slots: a batch is asked for, all are busy for 10 s, one for 2 s more; then 6 s of training, all idle."""
    clock = SlotClock(4, now=100.0)
    for now, running, asked in [(100, 4, True), (110, 1, True), (112, 0, False), (118, 4, True)]:
        clock.update(now, running=running, asked=asked)
    numbers = clock.take()
    assert numbers == {
        "rollout_seconds": 12,
        "rollout_idle_seconds_during_training": 4 * 6 / 4,
        "rollout_idle_seconds": (3 * 2 + 4 * 6) / 4,
        "between_batches_seconds": 18,
    }
    assert set(clock.take().values()) == {0}


def test_siblings_by_hand() -> None:
    """Rollouts of prompt 0 end at 2, 3 and 10 s, of prompt 1 at 4, 4 and 5 s: (8 + 7 + 0 + 1 + 1 + 0) / 6."""
    siblings, episode = Siblings(), random_trajectories(1, 20)[0]
    ends = [(0, 2, 2.0), (0, 0, 3.0), (1, 0, 4.0), (1, 1, 4.0), (1, 2, 5.0), (0, 1, 10.0)]
    groups, waiting = [], []
    for prompt, sample, now in ends:
        groups.append(siblings.add(replace(episode, prompt_index=prompt, turns=sample), sample, 3, now))
        waiting.append(siblings.count)
    assert [g and [t.turns for t in g] for g in groups] == [None, None, None, None, [0, 1, 2], [0, 1, 2]]
    assert waiting == [1, 2, 3, 4, 2, 0]
    assert siblings.take() == {"group_wait_seconds": pytest.approx(17 / 6)}
    assert siblings.take() == {}
    assert siblings.add(episode, 0, 1, 11.0) == [episode]  # alone in its group: it waits for nobody
    assert siblings.take() == {}


@pytest.mark.parametrize("in_flight", [4, 9])
def test_a_dying_episode_stops_the_run(in_flight: int) -> None:
    class Dying(ScriptedEngine):
        async def generate(self, token_ids: Any, sampling: Any) -> Any:
            if len(self.requests) == 6:
                raise ConnectionError("no server left")
            return await super().generate(token_ids, sampling)

    logs: list[list[str]] = []

    def make() -> ScriptedEnvironment:
        environment = ScriptedEnvironment([1000.0, DONE])
        logs.append(environment.log)
        return environment

    async def run() -> None:
        source = collector(Dying(GET), make, batch_size=8, max_in_flight=in_flight, streaming=in_flight > 8)
        try:
            for _ in range(2):  # and it stays so
                with pytest.raises(ConnectionError, match="no server left"):
                    player(source)._engine.requests = [None] * 6
                    await asyncio.wait_for(source.collect(0), 60)
        finally:
            await source.close()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
    assert logs
    assert all(log[-1] == "close" for log in logs if log)


def stream_batches(
    warm_start: Path, state: dict | None = None, seed: int = 0, batches: int = 3
) -> tuple[list[Batch], dict]:
    """Real episodes of a real model, more in flight than a batch holds."""
    settings = Settings(num_tasks=40)
    prompts = PromptStream(40, seed=5)
    if state is not None:
        prompts.load_state_dict(state["prompts"])
    source = collector(
        TransformersEngine(warm_start),
        lambda: KeyValueStore(settings),
        prompts,
        KeyValueStore.tasks(settings),
        batch_size=12,
        max_in_flight=20,
        streaming=True,
        seed=seed,
    )

    async def run() -> list[Batch]:
        collected = []
        for _ in range(batches):
            collected.append(await source.collect(0))
            source.trained(collected[-1])
        await source.close()
        return collected

    return asyncio.run(run()), source.state_dict()


def test_two_runs_are_equal_to_the_bit(warm_start: Path) -> None:
    first, again, other = (stream_batches(warm_start, seed=seed)[0] for seed in (0, 0, 1))
    for one, two in zip(first, again, strict=True):
        assert numbers(one) == numbers(two) == sorted(numbers(one))
        for a, b in zip(one.trajectories, two.trajectories, strict=True):
            assert np.array_equal(a.token_ids, b.token_ids)
            assert a.behavior_logprobs.tobytes() == b.behavior_logprobs.tobytes()
            assert (a.reward, a.end_reason, a.info) == (b.reward, b.end_reason, b.info)
    assert [t.token_ids.tolist() for t in first[0].trajectories] != [
        t.token_ids.tolist() for t in other[0].trajectories
    ]


def test_a_resumed_run_uses_every_prompt_once(warm_start: Path) -> None:
    """36 prompts used, some in flight at the stop; the resumed run takes those first and goes on in the same order."""
    before, state = stream_batches(warm_start)
    used = [n for batch in before for n in numbers(batch)]
    assert len(used) == len(set(used)) == 36
    assert set(range(state["prompts"]["position"])) == set(used) | set(state["prompts"]["unfinished"])
    assert len(state["prompts"]["unfinished"]) >= 1
    after, later = stream_batches(warm_start, state)
    used += [n for batch in after for n in numbers(batch)]
    assert len(used) == len(set(used)) == 72
    assert set(range(later["prompts"]["position"])) == set(used) | set(later["prompts"]["unfinished"])


def test_importing_the_package_is_cheap() -> None:
    code = (
        "import sys, nemo_flashrl.rollout, nemo_flashrl.environments as e; e.load('key_value_store');"
        "print(sorted({'transformers', 'nemo'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
