"""What every rank's step is made of: global weights, equal counts, errors that reach all ranks."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest
import torch
from processes import run_ranks
from tiny import random_trajectories

from nemo_flashrl.algorithms.advantages import group_advantages
from nemo_flashrl.algorithms.flash_reinforce import FlashReinforce, FlashReinforceSettings
from nemo_flashrl.algorithms.grpo import Grpo
from nemo_flashrl.batching.planner import BatchingSettings, LengthBatcher
from nemo_flashrl.data.collate import pad_rows
from nemo_flashrl.data.datamodule import RolloutDataModule, plan_steps
from nemo_flashrl.data.rank_step import stage_share
from nemo_flashrl.records import Batch


def steps_for(trajectories, dp_size: int, budget: int = 150, algorithm=None):
    settings = BatchingSettings(
        max_tokens_per_microbatch=budget, context_length=100, layout="padded", context_margin=0.0
    )
    batch = Batch(tuple(trajectories), 0)
    return plan_steps(batch, algorithm or FlashReinforce(), LengthBatcher(settings), dp_size=dp_size, seed=0)


def test_groups_of_different_sizes_are_compared_before_the_split() -> None:
    """Groups of 2, 4 and 8: each trajectory has the advantage and the weight of the whole batch, on 1, 2 or 3 ranks."""
    groups = [0] * 2 + [1] * 4 + [2] * 8 + [3] * 2
    batch = tuple(replace(t, group=g) for t, g in zip(random_trajectories(16, 50), groups, strict=True))
    right = group_advantages(torch.tensor([t.reward for t in batch]), torch.tensor(groups)).tolist()
    assert len({abs(round(advantage, 3)) for advantage in right}) > 3
    for dp_size in (1, 2, 3):
        found = {}
        for step in steps_for(batch, dp_size, algorithm=Grpo()):
            for m in step.microbatches:
                pairs = zip(m["advantages"].tolist(), m["token_weights"].tolist(), strict=True)
                found |= dict(zip(m["trajectory"].tolist(), pairs, strict=True))
        found.pop(-1, None)
        assert [found[i][0] for i in range(16)] == right
        assert [found[i][1] for i in range(16)] == pytest.approx([1 / (16 * t.action_count) for t in batch])


@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_weights_are_those_of_the_whole_batch(dp_size: int) -> None:
    """1 / (B T_i) whatever the split: B times the action-token weighted sum of weights is B / B = 1."""
    trajectories = random_trajectories(10, 50)
    steps = steps_for(trajectories, dp_size)
    total = sum(
        float((m["token_weights"][m["row_index"]] * m["target_mask"]).sum()) for s in steps for m in s.microbatches
    )
    assert total == pytest.approx(1.0, rel=1e-6)
    mean = sum(t.reward for t in trajectories) / 10
    advantages = sorted(a for s in steps for m in s.microbatches for a in m["advantages"].tolist() if a)
    assert advantages == pytest.approx(sorted(t.reward - mean for t in trajectories if t.reward != mean))


def test_ranks_run_equally_many_microbatches() -> None:
    """Three long trajectories on two ranks: the idle rank runs a masked row of weight 0."""
    trajectories = [t for t in random_trajectories(40, 50) if len(t.token_ids) > 40][:3]
    steps = steps_for(trajectories, dp_size=2, budget=60)
    assert [len(s.microbatches) for s in steps] == [2, 2]
    empty = [m for s in steps for m in s.microbatches if not m["target_mask"].any()]
    assert len(empty) == 1
    assert empty[0]["token_weights"].tolist() == [0.0]


def test_a_split_by_rank_would_show() -> None:
    """The counterexample: centring each rank's share by its own mean gives other advantages."""
    steps = steps_for(random_trajectories(10, 50, seed=2), dp_size=2)
    means = [torch.cat([m["advantages"] for m in s.microbatches]).mean().abs() for s in steps]
    assert max(means) > 0.01  # zero on each rank if each had centred itself


def test_an_error_of_the_collector_reaches_every_rank(tmp_path) -> None:
    """The collecting rank raises; without word from it the others would wait for ever."""
    run_ranks(2, "collector_error", tmp_path, timeout=60)
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert seen == [["ConnectionError", "no server answers"]] * 2


def test_a_batch_that_is_used_again_is_no_new_one(monkeypatch) -> None:
    """Mean rewards 1 and 0, each used twice, then 2: the window holds 1 and 0, so that A = 2 - 1/2."""
    monkeypatch.setattr("megatron.core.parallel_state.get_data_parallel_world_size", lambda: 1)
    made = [tuple(replace(t, reward=r) for t in random_trajectories(4, 50)) for r in (1.0, 0.0, 2.0)]
    source = iter([made[0], made[0], made[1], made[1], made[2]])
    algorithm = FlashReinforce(FlashReinforceSettings(baseline="window"))
    batcher = LengthBatcher(BatchingSettings(150, 100, context_margin=0.0))
    data = RolloutDataModule(lambda version: Batch(next(source), version), algorithm, batcher)
    steps = [data._collect_and_plan(version)[1][0] for version in range(5)]
    assert [set(step.advantages) for step in steps] == [{0.0}, {0.0}, {-1.0}, {-1.0}, {1.5}]


def test_a_stage_gets_what_it_reads() -> None:
    """37 bytes a token in all; the first stage reads 16 of them, the last 29, a stage between them none."""
    microbatch = pad_rows(random_trajectories(60, 90))
    count = microbatch["tokens"].numel()
    assert count > 1000
    sizes = {}
    for first, last in [(True, True), (True, False), (False, False), (False, True)]:
        share = pickle.loads(payload := pickle.dumps(stage_share(microbatch, first=first, last=last)))
        sizes[first, last] = len(payload)
        assert {n: (v.shape, v.dtype) for n, v in share.items()} == {
            n: (v.shape, v.dtype) for n, v in microbatch.items()
        }
        read = {"tokens": first, "position_ids": first or last, "targets": last, "behavior_logprobs": last}
        assert all(torch.equal(share[name], microbatch[name]) == is_read for name, is_read in read.items())
    rest = sizes[False, False]
    assert rest < 6000
    for stage, per_token in {(True, True): 37, (True, False): 16, (False, True): 29}.items():
        assert sizes[stage] - rest == pytest.approx(per_token * count, rel=0.02)


def test_every_rank_gets_its_own_bytes_alone(tmp_path) -> None:
    """One share of 100 kB: the rank with a small one receives less than 1 kB, where equal messages would be 200 kB."""
    run_ranks(3, "scatter", tmp_path, timeout=100)
    (own, none), (large, much), (small, little) = (json.loads((tmp_path / f"{r}.json").read_text()) for r in range(3))
    assert (own, large, small) == (3, 100_000, 6)
    assert none == []
    assert 100_000 <= sum(much) < 101_000
    assert sum(little) < 1000
