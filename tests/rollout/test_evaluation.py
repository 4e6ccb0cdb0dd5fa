"""pass@k, and the groups that a batch replaces."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import combinations

import pytest
from doubles import GET, SAMPLING, TOKENIZER, ScriptedEngine, ScriptedEnvironment, collector
from tiny import random_trajectories

from nemo_flashrl.environments.environment import Message, StepResult
from nemo_flashrl.records import Trajectory
from nemo_flashrl.rollout.collector import Collector
from nemo_flashrl.rollout.episode import Limits
from nemo_flashrl.rollout.metrics import environment_errors, pass_at_k, success_by_class, success_rate
from nemo_flashrl.rollout.player import evaluate


def samples(*solved: str):
    """A task a word, a sample a letter: x solved."""
    (one,) = random_trajectories(1, 9)
    return [replace(one, prompt_index=i, failed=letter != "x") for i, word in enumerate(solved) for letter in word]


def test_pass_at_k_by_hand() -> None:
    """c of n = 1 of 4 and 3 of 4: at k = 2, 1 - 3/6 = 1/2 and 1 - 0 = 1; at k = 1, 1/4 and 3/4."""
    tasks = samples("x...", "xx.x")
    assert pass_at_k(tasks, 1) == pytest.approx(success_rate(tasks)) == pytest.approx(0.5)
    assert pass_at_k(tasks, 2) == pytest.approx(0.75)
    assert pass_at_k(tasks, 4) == 1
    # The estimate from the mean success, 1 - (1 - c/n)^k, is biased: 7/16 and 15/16.
    assert pass_at_k(tasks, 2) != pytest.approx((7 / 16 + 15 / 16) / 2)
    # Tasks may have different numbers of samples: 1 - C(3, 2) / C(5, 2) = 7/10.
    assert pass_at_k(samples("xx...", ".."), 2) == pytest.approx(0.35)


def test_pass_at_k_is_the_mean_over_all_choices() -> None:
    word = "x..x.x."
    for k in range(1, 8):
        choices = list(combinations(word, k))
        right = sum("x" in chosen for chosen in choices) / len(choices)
        assert pass_at_k(samples(word), k) == pytest.approx(right)


def test_success_by_the_class_of_a_task() -> None:
    """Two tasks of class b with 1 and 3 of 4 solved, one of class a with none."""
    assert success_by_class(samples("x...", "..", "xx.x"), ["b", "a", "b"]) == {"a": 0.0, "b": 0.5}


def test_a_run_s_metrics_stay_as_many_whatever_the_classes() -> None:
    """Sixteen are named; of seventeen none is, and none where no class is known."""
    for count, told in ((16, 16), (17, 0)):
        assert len(success_by_class(samples(*["x"] * count), [f"c{number}" for number in range(count)])) == told
    assert success_by_class(samples("x"), []) == {}


@pytest.mark.parametrize("k", [0, 3])
def test_pass_at_k_needs_samples(k: int) -> None:
    with pytest.raises(ValueError, match=f"k={k}: must be from 1 to the 2 samples of a task"):
        pass_at_k(samples("xxx", ".."), k)


def test_samples_of_a_task_are_together_and_differ_in_their_randomness() -> None:
    engine = ScriptedEngine(GET)
    played = asyncio.run(
        evaluate(
            engine,
            lambda: ScriptedEnvironment([StepResult(done=True)]),
            range(2),
            TOKENIZER,
            Limits(max_context=128),
            SAMPLING,
            max_in_flight=6,
            samples=3,
        )
    )
    assert [t.prompt_index for t in played] == [0, 0, 0, 1, 1, 1]
    assert len({sampling.seed for _, sampling in engine.requests}) == 6


def test_no_more_episodes_at_a_time_than_allowed() -> None:
    """A server of two sessions refuses a third."""
    open_now = 0

    class Session(ScriptedEnvironment):
        held = False

        async def reset(self, task: int) -> list[Message]:
            nonlocal open_now
            if open_now == 2:
                raise ConnectionError("all sessions are taken")
            self.held = True
            open_now += 1
            await asyncio.sleep(0.01 * (task == 0))  # the first ends last
            return await super().reset(task)

        async def close(self) -> None:
            nonlocal open_now
            open_now -= self.held

    def played(max_in_flight: int) -> list[Trajectory]:
        made = (Session([StepResult(reward=1.0, done=True)]) for _ in range(9))
        limits = Limits(max_context=128)
        return asyncio.run(
            evaluate(
                ScriptedEngine(GET),
                lambda: next(made),
                range(9),
                TOKENIZER,
                limits,
                SAMPLING,
                max_in_flight=max_in_flight,
            )
        )

    bounded = played(2)
    assert [t.prompt_index for t in bounded] == list(range(9))
    assert (success_rate(bounded), environment_errors(bounded)) == (1, 0)
    assert environment_errors(played(9)) == 7


def rewarding(*rewards: float) -> Collector:
    """Episodes earn these, in the order in which they begin: the samples of a prompt follow each other."""
    order = iter(rewards)
    return collector(
        ScriptedEngine(GET),
        lambda: ScriptedEnvironment([StepResult(reward=next(order), done=True)]),
        batch_size=4,
        group_size=2,
        max_in_flight=4,
        dynamic_sampling_max_groups=2,
    )


def test_groups_of_equal_rewards_are_replaced() -> None:
    """Prompts 0 and 2 are tied; 1 and 3 make the batch."""
    source = rewarding(0, 0, 1, 0, 1, 1, 0, 1)
    batch = asyncio.run(source.collect(0))
    assert [(t.prompt_index, t.reward) for t in batch.trajectories] == [(1, 1), (1, 0), (3, 0), (3, 1)]
    assert batch.metrics["dropped_tied"] == 4
    source.trained(batch)
    prompts = source.state_dict()["prompts"]
    assert prompts["unfinished"] == []  # replaced ones are spent


def test_replacements_are_bounded() -> None:
    """All prompts are tied: two are replaced in each batch, then they are taken."""
    source = rewarding(*[0.5] * 16)

    async def run() -> list[list[int]]:
        return [[t.prompt_index for t in (await source.collect(v)).trajectories] for v in range(2)]

    assert asyncio.run(run()) == [[2, 2, 3, 3], [6, 6, 7, 7]]
