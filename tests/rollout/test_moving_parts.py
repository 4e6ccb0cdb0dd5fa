"""What the rollouts of a run move by themselves: the group size, and which tasks come."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from doubles import GET, STOP, TOKENIZER, ScriptedEngine, ScriptedEnvironment, collector, ids, numbers, player
from tiny import random_trajectories

from nemo_flashrl.algorithms.schedules import GroupSize
from nemo_flashrl.config import load
from nemo_flashrl.environments.environment import StepResult
from nemo_flashrl.records import Batch, Sampling
from nemo_flashrl.rollout.collector import Collector
from nemo_flashrl.rollout.curriculum import Curriculum, classes_of
from nemo_flashrl.rollout.episode import Limits
from nemo_flashrl.rollout.from_config import moving_group_size, prompt_source
from nemo_flashrl.rollout.groups import Groups
from nemo_flashrl.rollout.prompts import PromptGroupSizes, PromptSource, PromptStream


def test_a_group_grows_above_the_threshold_and_shrinks_below() -> None:
    size = GroupSize(8, every=2, threshold=0.3, batch_size=64)
    assert [size.after_step(std) or size.value for std in (0.5, 0.2, 0.3, 0.3, 0.1, 0.4, 0.0, 0.0)] == [
        8, 16,  # the mean of two steps is 0.35: up
        16, 16,  # at the threshold it stays
        16, 8,  # 0.25: down, though the last step alone is above
        8, 4,
    ]  # fmt: skip
    for _ in range(4):
        size.after_step(0.0)
    assert size.value == 4  # the smallest there is
    assert GroupSize(4, every=1, threshold=0, batch_size=24).sizes == [4, 8]  # 16 and 32 do not divide 24
    for start, batch in ((5, 40), (16, 24), (8, 6)):
        told = f"group_size={start}: with group_size.every=1 and rollout.batch_size={batch}"
        with pytest.raises(ValueError, match=told):
            GroupSize(start, every=1, threshold=0.3, batch_size=batch)


def test_a_group_size_goes_on_from_a_checkpoint() -> None:
    deviations = np.random.default_rng(0).random(40).tolist()
    whole = GroupSize(8, every=3, threshold=0.5, batch_size=96)
    values = [whole.after_step(std) or whole.value for std in deviations]
    assert len(set(values)) > 2
    for cut in range(40):
        first, second = (GroupSize(8, every=3, threshold=0.5, batch_size=96) for _ in range(2))
        for std in deviations[:cut]:
            first.after_step(std)
        second.load_state_dict(first.state_dict())
        assert [second.after_step(std) or second.value for std in deviations[cut:]] == values[cut:]


def test_the_collector_keeps_its_budget_while_groups_grow() -> None:
    """Rewards that differ in every group: 8 rollouts of 4 prompts, then 16 of 2, then 32 of 1."""
    played = Counter()

    def make() -> ScriptedEnvironment:
        played["episodes"] += 1
        return ScriptedEnvironment([StepResult(reward=float(played["episodes"] % 2), done=True)])

    def collector() -> Collector:
        return Collector(
            ScriptedEngine(ids("get ( k 2 9 )")), make, range(50), TOKENIZER, PromptStream(50),
            Limits(max_context=128), Sampling(max_tokens=8, stop_token_ids=(STOP,)),
            batch_size=32, group_size=8, max_in_flight=32,
            group_sizes=GroupSize(8, every=1, threshold=0.3, batch_size=32),
        )  # fmt: skip

    async def run(source: Collector, steps: range) -> list[dict[int, int]]:
        batches = []
        for version in steps:
            batch = await source.collect(version)
            batches.append(dict(Counter(t.prompt_index for t in batch.trajectories)))
            source.trained(batch)
        return batches

    source = collector()
    batches = asyncio.run(run(source, range(3)))
    assert batches == [{0: 8, 1: 8, 2: 8, 3: 8}, {4: 16, 5: 16}, {6: 32}]
    assert source.state_dict()["totals"]["trajectories_trained"] == 96 == played["episodes"]
    resumed = collector()
    resumed.load_state_dict(source.state_dict())
    assert asyncio.run(run(resumed, range(3, 4))) == [{7: 32}]


def test_a_moving_group_size_is_refused_where_it_cannot_move() -> None:
    base = ["output=x", "model.path=x", "group_size.every=5"]
    for mode in (["rollout.mode=async"], ["rollout.lag=1"]):
        with pytest.raises(
            ValueError, match="group_size.every=5: a group's size changes only with no episode in flight"
        ):
            load("rehearsal", [*base, *mode])
    config = load("rehearsal", base)
    with pytest.raises(ValueError, match="group_size.every=5: flash_reinforce has no groups"):
        moving_group_size(config, 1)
    assert moving_group_size(config, 8).sizes == [4, 8, 16, 32]


def per_prompt(lowest: int = 2, highest: int = 16, batch_size: int = 32) -> PromptGroupSizes:
    return PromptGroupSizes(8, lowest=lowest, highest=highest, batch_size=batch_size)


def test_group_sizes_follow_each_tasks_own_history_by_hand() -> None:
    """Task 0 is always solved, task 1 now and then; B = 32."""
    sizes, mixed = per_prompt(), [0.0] * 7 + [1.0]
    begun = [[sizes.begin(prompt, prompt % 2) for prompt in range(4)]]  # nothing is known: 8, 8, 8 and 8 of 32
    sizes.trained({0: [1.0] * 8, 1: mixed})
    begun.append([sizes.begin(prompt, prompt % 2) for prompt in range(4, 7)])  # 4, 16, 4
    sizes.trained({2: [1.0] * 8, 3: mixed})
    assert sizes.begin(7, 1) == 8  # 16 are wanted, and 32 - 24 are left of the second 32
    assert begun == [[8, 8, 8, 8], [4, 16, 4]]
    sizes.trained({4: [1.0] * 4, 5: mixed * 2, 6: [0.0] * 4})
    assert [sizes.begin(8, 0), sizes.begin(9, 1), sizes.begin(10, 5)] == [2, 16, 8]  # no fewer, no more; task 5 is new
    sizes.dropped(9, [1.0] * 16, "too_old")  # what enters no batch is begun again, and is no history
    assert [sizes.begin(11, 1), sizes.begin(12, 1)] == [16, 4]  # 4: 32 - 2 - 8 - 16 = 6 are left
    sizes.dropped(12, [0.0] * 4, "tied")  # fewer than its task's 16: no sign that these are too many
    assert sizes.begin(13, 1) == 4
    sizes.dropped(11, [0.0] * 16, "tied")
    assert sizes.begin(14, 1) == 8
    other = per_prompt()
    other.load_state_dict(sizes.state_dict())
    assert [other.begin(0, 1), other.begin(1, 0), other.begin(2, 9)] == [8, 2, 8]  # task 1 was tied once since
    narrow = per_prompt(lowest=4)
    narrow.load_state_dict(sizes.state_dict())
    assert narrow.begin(0, 0) == 8  # 2 is no size of this run
    assert sizes.metrics([[1.0] * 2, mixed, [0.0] * 16, [1.0] * 4]) == {"tied_trajectories_saved": 6 - 8 + 4}
    for state in ({}, GroupSize(8, every=2, threshold=0.3, batch_size=64).state_dict()):
        other.load_state_dict(state)
        assert other.state_dict() == {"tasks": []}
    every = GroupSize(8, every=2, threshold=0.3, batch_size=64)
    every.load_state_dict(sizes.state_dict())
    assert every.value == 8


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["group_size.min=1"], "group_size.min=1: must be at least 2"),
        (["group_size.max=4", "group_size.min=8"], r"group_size.max=4: must be at least group_size.min \(8\), or 0"),
        (["group_size.max=16", "group_size.every=5"], "group_size.max=16: group_size.every=5 sets one size for all"),
        (["group_size.max=12"], r"group_size.max=12: must be group_size.min times a power of 2, .* \(2\) at least 2"),
        (["group_size.max=64", "rollout.batch_size=96"], r"rollout.batch_size=96: must be a multiple of .* \(64\)"),
        (["group_size.max=4"], "algorithm.settings.group_size=8: with group_size.min=2 .* must be one of 2, 4$"),
    ],
)
def test_group_sizes_that_cannot_be_are_refused(settings: list[str], told: str) -> None:
    with pytest.raises(ValueError, match=told) as refused:
        moving_group_size(load("rehearsal", ["output=x", "model.path=x", "algorithm=grpo", *settings]), 8)
    assert "\n" not in str(refused.value)


def test_an_algorithm_without_groups_refuses_their_sizes() -> None:
    config = load("rehearsal", ["output=x", "model.path=x", "group_size.max=16"])
    with pytest.raises(ValueError, match="group_size.max=16: flash_reinforce has no groups; set 0"):
        moving_group_size(config, 1)
    assert moving_group_size(config, 8).sizes == [2, 4, 8, 16]


def test_a_batch_takes_the_first_groups_that_make_it_up() -> None:
    """Against all subsets: the first in order of those that hold exactly so many trajectories."""
    rng, (one,) = np.random.default_rng(0), random_trajectories(1, 20)
    for _ in range(200):
        sizes = rng.choice([2, 4, 8], size=9).tolist()
        groups = Groups()
        for number, size in enumerate(sizes):
            groups.append([replace(one, prompt_index=number)] * size)
        count = int(rng.integers(1, sum(sizes) // 8 + 1)) * 8
        fitting = [
            chosen for length in range(10) for chosen in itertools.combinations(range(9), length)
            if sum(sizes[i] for i in chosen) == count
        ]  # fmt: skip
        assert [group[0].prompt_index for group in groups.take(count)] == list(min(fitting))
        assert [group[0].prompt_index for group in groups] == [i for i in range(9) if i not in min(fitting)]
        assert groups.count == sum(sizes) - count
    with pytest.raises(AssertionError, match="lacking"):
        groups.take(1000)


class Rated(ScriptedEnvironment):
    """Tasks 0, 3, 6, ... are solved always, 1, 4, 7, ... never, the others in every second episode."""

    episodes = itertools.count()
    longest = 0.005  # seconds of an episode

    async def reset(self, task: int) -> list:
        number = next(self.episodes)
        reward = [1.0, 0.0, float(number % 2)][task % 3]
        self.results = [
            number * 7919 % 11 / 10 * self.longest,
            StepResult(reward=reward, done=True, success=reward > 0),
        ]
        return await super().reset(task)


def played(source: Collector, steps: range, look: Callable[[Batch], None] = lambda batch: None) -> list[Batch]:
    async def run() -> list[Batch]:
        batches = []
        for version in steps:
            player(source)._engine.version = version
            batches.append(await asyncio.wait_for(source.collect(version), 60))
            look(batches[-1])
            source.trained(batches[-1])
        await source.close()
        return batches

    return asyncio.run(run())


def sizes_by_kind(batches: list[Batch], prompts: PromptStream) -> dict[int, list[int]]:
    sizes: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for batch in batches:
        for prompt, size in Counter(numbers(batch)).items():
            sizes[prompts.task_index(prompt) % 3].append(size)
    return sizes


@pytest.mark.parametrize(
    "mode",
    [
        {"max_in_flight": 32},
        {"max_in_flight": 5},
        {"max_in_flight": 32, "dynamic_sampling_max_groups": 3},
        {"max_in_flight": 40, "streaming": True},
        {"max_in_flight": 3, "streaming": True},
        {"max_in_flight": 90, "streaming": True, "max_staleness": 1},
        {"max_in_flight": 50, "streaming": True, "dynamic_sampling_max_groups": 2, "max_staleness": 2},
    ],
    ids=str,
)
def test_every_batch_holds_exactly_its_trajectories(mode: dict) -> None:
    """Whole groups of different sizes, none lost and none left behind, in every mode."""
    prompts, sizes = PromptStream(18, seed=1), per_prompt(batch_size=64)
    source = collector(
        ScriptedEngine(GET), lambda: Rated([]), prompts, range(18), batch_size=64, group_sizes=sizes, **mode
    )
    seen: Counter[int] = Counter()

    def look(batch: Batch) -> None:
        whole = Counter(numbers(batch))
        assert len(batch.trajectories) == 64 and set(whole.values()) <= {2, 4, 8, 16}
        assert not seen & whole  # a prompt is in one batch
        seen.update(whole)
        if not mode.get("streaming"):
            assert batch.metrics["queue_depth"] == 0

    batches = played(source, range(16), look)
    state = source.state_dict()
    dropped = sum(n for name, n in state["totals"].items() if name.startswith("trajectories_dropped"))
    assert state["totals"]["trajectories_trained"] == 16 * 64 == seen.total()
    unfinished = set(state["prompts"]["unfinished"])
    assert bool(dropped) == ("dynamic_sampling_max_groups" in mode or "max_staleness" in mode)
    if not mode.get("streaming"):
        assert not unfinished
    long_ago = max(prompt for batch in batches[:-4] for prompt in numbers(batch))
    assert all(prompt > long_ago for prompt in unfinished)  # no group is passed over for long
    last = sizes_by_kind(batches[8:], prompts)
    assert np.mean(last[2]) > 10 > 3 > np.mean(last[0] + last[1])
    assert sum(batch.metrics["tied_trajectories_saved"] for batch in batches[8:]) > 0


def test_no_group_waits_for_long_where_a_batch_is_one_large_group() -> None:
    """B = 16 = the largest size, streaming: a small group enters with others that make up what it lacks."""
    source = collector(
        ScriptedEngine(GET), lambda: Rated([]), PromptStream(18, seed=1), range(18), batch_size=16, max_in_flight=40,
        streaming=True, group_sizes=per_prompt(batch_size=16),
    )  # fmt: skip
    ages = []

    def look(batch: Batch) -> None:
        assert len(batch.trajectories) == 16
        ages.append(batch.metrics["staleness_max"])

    played(source, range(60), look)
    assert max(ages) <= 6  # the 40 in flight alone make 3 batches


def test_group_sizes_go_on_from_a_checkpoint(monkeypatch) -> None:
    """The batches after a resume are those of a run in one go, prompt for prompt, with a curriculum as well."""

    def make(curriculum: bool) -> Collector:
        prompts: PromptSource = PromptStream(12, seed=1)
        if curriculum:
            prompts = Curriculum([f"c{i % 3}" for i in range(12)], seed=1, adaptive_steps=99)
        return collector(
            ScriptedEngine(GET), lambda: Rated([]), prompts, range(12), batch_size=32, max_in_flight=7,
            group_sizes=per_prompt(), dynamic_sampling_max_groups=1,
        )  # fmt: skip

    monkeypatch.setattr(Rated, "longest", 0.0)  # groups end in an order that no clock decides
    for curriculum in (False, True):
        Rated.episodes = itertools.count()
        right = [numbers(batch) for batch in played(make(curriculum), range(14))]
        Rated.episodes = itertools.count()
        first = make(curriculum)
        assert [numbers(batch) for batch in played(first, range(9))] == right[:9]
        second = make(curriculum)
        second.load_state_dict(first.state_dict())
        assert [numbers(batch) for batch in played(second, range(9, 14))] == right[9:]
        forgetful = make(curriculum)  # a history that is lost is seen
        forgetful.load_state_dict({**first.state_dict(), "group_sizes": {}})
        assert [numbers(batch) for batch in played(forgetful, range(9, 14))] != right[9:]


def test_shares_follow_what_can_be_learnt() -> None:
    """Three classes of 2 tasks: one solved always, one never, one now and then; floor 0.3.

    After two prompts each, played = 0.9 + 1 = 1.9: p = 2.9 / 3.9, 1 / 3.9 and (1 + 0.9 * 0 + 1) / 3.9 for 0 then 1.
    p (1 - p) = 2.9, 2.9 and 2 * 1.9 = 3.8, all / 3.9^2; their sum is 9.6.
    """
    source = Curriculum(["easy", "hard", "mid"] * 2, adaptive_steps=4, floor=0.3)
    assert source.shares == pytest.approx([1 / 3] * 3)
    handed = {}
    for _ in range(40):
        prompt, task = source.next()
        handed.setdefault(task % 3, []).append(prompt)
    for turn, mid in enumerate((0.0, 1.0)):
        source.trained({handed[0][turn]: 1.0, handed[1][turn]: 0.0, handed[2][turn]: mid})
    assert source.success == pytest.approx([2.9 / 3.9, 1 / 3.9, 2 / 3.9])
    right = [0.1 + 0.7 * part / 9.6 for part in (2.9, 2.9, 3.8)]
    assert source.shares == pytest.approx(right)
    assert source.metrics()["curriculum_share_mid"] == pytest.approx(right[2])
    for turn in (2, 3):
        source.trained({handed[0][turn]: 1.0})
    assert source.shares == pytest.approx([1 / 3] * 3)  # step 4: the mixture is fixed from here


def success_of(source: Curriculum, *wanted: float) -> None:
    """Bring each class's estimate to about `wanted` by many prompts that are solved in that share."""
    for _ in range(200):
        source.trained({prompt: wanted[task % len(wanted)] for prompt, task in (source.next() for _ in range(6))})


def test_the_two_rules_by_the_docstring_s_example() -> None:
    """p = .8, .5 and .1 of three equal classes, floor .1, threshold .6; the rules disagree on which comes most."""
    right = {"variance": [0.321, 0.483, 0.195], "threshold": [0.033, 0.183, 0.783]}
    for rule, shares in right.items():
        source = Curriculum(["a", "b", "c"], adaptive_steps=9, rule=rule, threshold=0.6, floor=0.1)
        source._solved, source._played = np.array([1.4, 0.5, 0.0]), np.array([1.0, 1.0, 8.0])  # (s + 1) / (n + 2)
        assert source.success == pytest.approx([0.8, 0.5, 0.1])
        assert source.shares == pytest.approx(shares, abs=5e-4)
        assert source.shares.sum() == pytest.approx(1)


def plain_shares(rule: str, success: list[float], mixture: list[float], floor: float, threshold: float) -> list[float]:
    """The docstring's formula, a class at a time."""
    weights = [p * (1 - p) if rule == "variance" else max(0.0, threshold - p) for p in success]
    total = sum(m * w for m, w in zip(mixture, weights, strict=True))
    if not total:
        return mixture
    return [floor * m + (1 - floor) * m * w / total for m, w in zip(mixture, weights, strict=True)]


@pytest.mark.parametrize("rule", ["variance", "threshold"])
def test_shares_against_a_plain_reference(rule: str) -> None:
    """Prompts of random success: estimates and shares are those of two plain loops, and not the other rule's."""
    rng, mixture = np.random.default_rng(3), {"a": 1.0, "b": 2.0, "c": 5.0}
    source = Curriculum(list("abc") * 4, adaptive_steps=99, rule=rule, threshold=0.4, floor=0.25, mixture=mixture)
    solved, played, other = [0.0] * 3, [0.0] * 3, {"variance": "threshold", "threshold": "variance"}[rule]
    for _ in range(30):
        prompt, task = source.next()
        outcome, kind = float(rng.random() < (0.9, 0.4, 0.05)[task % 3]), task % 3
        source.trained({prompt: outcome})
        solved[kind], played[kind] = 0.9 * solved[kind] + outcome, 0.9 * played[kind] + 1
        success = [(s + 1) / (n + 2) for s, n in zip(solved, played, strict=True)]
        assert source.success == pytest.approx(success, rel=1e-12)
        given = success, [1 / 8, 2 / 8, 5 / 8], 0.25, 0.4
        assert source.shares == pytest.approx(plain_shares(rule, *given), rel=1e-12)
    assert source.shares != pytest.approx(plain_shares(other, *given), rel=1e-2)


def test_where_every_class_is_above_the_threshold_the_mixture_is_drawn() -> None:
    source = Curriculum(["a", "b"], adaptive_steps=10**6, rule="threshold", threshold=0.3, mixture={"a": 1, "b": 4})
    assert source.shares == pytest.approx([0.2, 0.8])  # nothing is known: 1/2 of both
    success_of(source, 0.9, 0.6)
    assert source.shares == pytest.approx([0.2, 0.8])
    success_of(source, 0.9, 0.1)
    assert source.shares == pytest.approx([0.2 * 0.2, 0.8 + 0.2 * 0.8])  # floor .2; all else to b


def test_a_fixed_mixture_needs_no_curriculum() -> None:
    """With mode none, from the first prompt on, and however well a class is solved."""
    mixture = ["curriculum.classes=hops", "curriculum.mixture.1=1", "curriculum.mixture.2=3"]
    config = load("rehearsal", ["output=x", "model.path=x", *mixture])
    tasks = [Task(1)] * 50 + [Task(2)] * 50
    source = prompt_source(config, tasks)
    drawn = Counter()
    for _ in range(800):
        prompt, task = source.next()
        drawn[tasks[task].hops] += 1
        source.trained({prompt: float(tasks[task].hops == 1)})
        assert source.shares == pytest.approx([0.25, 0.75])
    assert 550 < drawn[2] < 650  # 600, 12 each way are one standard deviation
    assert source.metrics()["curriculum_success_1"] > 0.8 and source.metrics()["curriculum_success_2"] < 0.2
    with pytest.raises(ValueError, match="curriculum.mixture: the checkpoint is of a run with mode=none; leave it out"):
        source.load_state_dict(PromptStream(100).state_dict())
    with pytest.raises(ValueError, match=r"curriculum.mixture names \['1', '2'\]: the tasks' classes are \['1', '4'\]"):
        prompt_source(config, [Task(1), Task(4)])
    with pytest.raises(ValueError, match="curriculum.classes='hops': task 0 has no field of that name, or None in it"):
        prompt_source(config, [{"depth": 1}])


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("curriculum.threshold=0", "curriculum.threshold=0.0: must be at least"),
        ("curriculum.threshold=1", "curriculum.threshold=1.0: must be at least 1e-12, at most 0.999999"),
        ("curriculum.rule=below", "curriculum.rule='below': must be one of variance, threshold"),
        ("curriculum.mixture.1=1", r"curriculum.mixture=\{'1': 1.0\} needs curriculum.classes, the field of a task"),
        ("curriculum.mixture.1=-1", r"curriculum.mixture=\{'1': -1.0\}: every class needs a weight above 0"),
    ],
)
def test_settings_of_a_curriculum_that_cannot_be(override: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        load("rehearsal", ["output=x", "model.path=x", override])


def test_no_class_starves() -> None:
    """Easy tasks are solved always, hard ones never: each keeps its floor, and without one the hard ones get less."""

    def drawn(floor: float) -> Counter:
        source = Curriculum(["easy"] * 90 + ["hard"] * 10, seed=3, adaptive_steps=10**6, floor=floor)
        kinds: Counter = Counter()
        for _ in range(2000):
            prompt, task = source.next()
            kinds["hard" if task >= 90 else "easy"] += 1
            source.trained({prompt: float(task < 90)})
        return kinds

    assert 120 < drawn(1.0)["hard"] < 280  # the mixture itself: a tenth
    assert drawn(0.5)["hard"] >= 0.5 * 0.1 * 2000


@pytest.mark.parametrize("rule", ["variance", "threshold"])
def test_a_curriculum_goes_on_from_a_checkpoint(rule: str) -> None:
    """Unfinished prompts come first, with their tasks; then the draws are those of the run that was not interrupted."""

    def make() -> Curriculum:
        return Curriculum([f"c{i % 4}" for i in range(30)], seed=5, adaptive_steps=20, rule=rule, floor=0.1)

    def play(source: Curriculum, steps: int) -> list[tuple[int, int]]:
        handed = []
        for _ in range(steps):
            prompts = [source.next() for _ in range(3)]
            handed += prompts
            source.trained({prompt: float(task % 4 == 0) for prompt, task in prompts})
        return handed

    whole, first, second = make(), make(), make()
    expected = play(whole, 30)
    assert play(first, 11) == expected[:33]
    second.load_state_dict(first.state_dict())
    assert play(second, 19) == expected[33:]
    assert len({prompt for prompt, _ in expected}) == 90

    third, fourth = make(), make()
    in_flight = dict(third.next() for _ in range(5))
    third.finish(2)
    fourth.load_state_dict(third.state_dict())
    again = [fourth.next() for _ in range(5)]
    assert [prompt for prompt, _ in again] == [0, 1, 3, 4, 5]
    assert all(in_flight[prompt] == task for prompt, task in again[:4])
    for other in (PromptStream(30, seed=5), Curriculum(["a"] * 30, seed=6, adaptive_steps=1)):
        with pytest.raises(ValueError, match="curriculum"):
            other.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="curriculum.mode=adaptive: the checkpoint is of a run with mode=none"):
        make().load_state_dict(PromptStream(30, seed=5).state_dict())


def test_tasks_of_a_class_all_come_before_one_comes_again() -> None:
    source = Curriculum(["a", "b", "b", "b", "a"], seed=1, adaptive_steps=0, mixture={"a": 1, "b": 3})
    seen = [task for _, task in (source.next() for _ in range(400))]
    of_b = [task for task in seen if task in (1, 2, 3)]
    assert 260 < len(of_b) < 340  # three quarters
    assert all(sorted(of_b[i : i + 3]) == [1, 2, 3] for i in range(0, len(of_b) - 3, 3))
    with pytest.raises(ValueError, match=r"curriculum.mixture names \['a'\]: the tasks' classes are \['a', 'b'\]"):
        Curriculum(["a", "b"], adaptive_steps=0, mixture={"a": 1})
    with pytest.raises(ValueError, match="every class needs a weight above 0"):
        Curriculum(["a", "b"], adaptive_steps=0, mixture={"a": 1, "b": 0})


@dataclass
class Task:
    hops: int


def test_the_class_of_a_task_is_one_of_its_fields() -> None:
    assert classes_of([Task(1), Task(3)], "hops") == classes_of([{"hops": 1}, {"hops": 3}], "hops") == ["1", "3"]
    assert len(set(classes_of([Task(1)] * 3, ""))) == 3
    with pytest.raises(ValueError, match="curriculum.classes='depth': task 0 has no field of that name"):
        classes_of([Task(1)], "depth")
    config = load("rehearsal", ["output=x", "model.path=x", "curriculum.mode=adaptive", "curriculum.classes=hops"])
    source = prompt_source(config, [Task(1), Task(2)])
    assert list(source.names) == ["1", "2"]
