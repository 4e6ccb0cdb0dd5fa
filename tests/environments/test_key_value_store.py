"""The rehearsal's task: its rules, its tasks and its strictness."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from nemo_flashrl import environments
from nemo_flashrl.environments.environment import Environment, StepResult
from nemo_flashrl.environments.key_value_store import Entry, KeyValueStore, Settings, Task, make_task

# 29 -> 40 -> value 17; 50 holds another value
TASK = Task(key=29, answer=17, hops=2, store={29: Entry("k", 40), 40: Entry("v", 17), 50: Entry("v", 3)})


def play(*actions: str, task: Task = TASK, settings: Settings = Settings()) -> list[StepResult]:
    async def episode() -> list[StepResult]:
        store = KeyValueStore(settings)
        assert await store.reset(task) == [{"role": "user", "content": "Q k 2 9 :"}]
        results = [await store.step(action) for action in actions]
        await store.close()
        return results

    return asyncio.run(episode())


def test_an_episode_by_hand() -> None:
    first, second, last = play("get ( k 2 9 )", "get ( k 4 0 )", "answer ( v 1 7 )")
    assert (first.observation, first.reward, first.done) == ("> k 4 0", 0.0, False)
    assert (second.observation, second.reward, second.done) == ("> v 1 7", 0.0, False)
    assert (last.observation, last.reward, last.done, last.success) == ("", 1.0, True, True)
    assert last.info == {"outcome": "answered", "hops": 2, "calls": 2}


@pytest.mark.parametrize("answer", ["answer ( v 4 0 )", "answer ( v 0 3 )"])
def test_only_the_value_at_the_end_is_rewarded(answer: str) -> None:
    last = play("get ( k 2 9 )", answer)[-1]
    assert (last.reward, last.done, last.success) == (0.0, True, False)


def test_a_guess_without_a_call_counts() -> None:
    assert play("answer ( v 1 7 )")[0].reward == 1.0


@pytest.mark.parametrize(
    "action",
    [
        "",
        "get ( k 2 9",
        "get ( k 2 9 ) )",
        " get ( k 2 9 )",
        "get ( k 2 9 )\n",
        "get  ( k 2 9 )",
        "get ( k 29 )",
        "get ( v 2 9 )",
        "answer ( k 1 7 )",
        "answer ( v 1 )",
        "get ( k ² 9 )",  # a digit to str.isdigit
        "get ( k ٢ 9 )",  # a digit to \d
        "get ( k 2 _ 9 )",
    ],
)
def test_anything_else_ends_with_nothing(action: str) -> None:
    (result,) = play(action)
    assert (result.reward, result.done, result.success, result.info["outcome"]) == (0.0, True, False, "malformed")
    assert result.malformed


def test_the_seventh_call_is_one_too_many() -> None:
    results = play(*["get ( k 2 9 )"] * 6, "answer ( v 1 7 )")
    assert [r.done for r in results] == [False] * 6 + [True]
    assert results[-1].reward == 1.0
    last = play(*["get ( k 2 9 )"] * 7)[-1]
    assert (last.done, last.reward, last.info["outcome"]) == (True, 0.0, "too_many_calls")


def test_a_missing_key_is_an_observation() -> None:
    assert play("get ( k 7 7 )")[0] == StepResult(observation="> !")


def test_a_task_depends_on_seed_and_index_alone() -> None:
    tasks = KeyValueStore.tasks(Settings(seed=3))
    backwards = [tasks[i] for i in (5, 1, 0)]
    assert backwards == [make_task(Settings(seed=3, num_tasks=7), i) for i in (5, 1, 0)]
    assert len(tasks) == 100_000
    assert len({make_task(Settings(seed=s), i).prompt for s in (0, 1) for i in range(50)}) > 40
    with pytest.raises(IndexError):
        tasks[100_000]


def test_chains_are_as_long_as_they_say() -> None:
    """3000 tasks, hops uniform in 1..3: 1000 of each, give or take 4 standard deviations of 26."""
    hops, values = Counter(), 0
    for i in range(3000):
        task = make_task(Settings(seed=9), i)
        assert len(task.store) == 100
        key, calls = task.key, 1
        while task.store[key].kind == "k":
            key, calls = task.store[key].number, calls + 1
        assert (calls, task.store[key].number) == (task.hops, task.answer)
        hops[calls] += 1
        values += sum(entry.kind == "v" for entry in task.store.values())
    assert sorted(hops) == [1, 2, 3]
    assert all(abs(count - 1000) < 105 for count in hops.values())
    # Off the chain (100 - 2 entries on average) 35% are values, on it the last one: 0.35 * 98 + 1 = 35.3.
    assert values / 3000 == pytest.approx(35.3, abs=0.4)


def test_smaller_stores_and_longer_chains() -> None:
    task = make_task(Settings(entries=5, max_hops=5, value_share=1.0), 0)
    assert len(task.store) == 5
    assert sum(entry.kind == "k" for entry in task.store.values()) == task.hops - 1


@pytest.mark.parametrize(
    ("field", "value"), [("entries", 101), ("max_hops", 0), ("value_share", 1.5), ("max_calls", 0), ("num_tasks", -1)]
)
def test_impossible_settings_are_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field}={value}"):
        Settings(**{field: value})


def test_it_is_found_by_its_name() -> None:
    assert environments.load("key_value_store") is KeyValueStore
    assert isinstance(KeyValueStore(Settings()), Environment)
