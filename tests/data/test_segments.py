"""A trajectory of several segments: one reward, one advantage, one gate, whatever the layout. B counts trajectories."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from nemo_flashrl.algorithms.algorithm import TokenBatch
from nemo_flashrl.algorithms.flash_reinforce import FlashReinforce, FlashReinforceSettings
from nemo_flashrl.algorithms.unfused_loss import policy_loss
from nemo_flashrl.batching.planner import BatchingSettings, LengthBatcher
from nemo_flashrl.data.collate import pack_rows, pad_rows, truncate
from nemo_flashrl.data.datamodule import plan_steps
from nemo_flashrl.records import NO_VERSION, Batch, Trajectory


def trajectory(tokens: list[int], mask: str, logprobs: list[float], reward: float, *starts: int) -> Trajectory:
    sampled = np.array([letter == "x" for letter in mask])
    return Trajectory(
        prompt_index=0,
        group=0,
        token_ids=np.array(tokens),
        action_mask=sampled,
        behavior_logprobs=np.array(logprobs, dtype=np.float32),
        versions=np.where(sampled, 0, NO_VERSION).astype(np.int32),
        reward=reward,
        turns=2,
        end_reason="done",
        failed=reward == 0,
        segment_starts=(0, *starts),
    )


# Segments [7 8 5 2] and [9 6 1]; three action tokens: 5 and 2 of the first, 1 of the second.
TWO = trajectory([7, 8, 5, 2, 9, 6, 1], "..xx..x", [0, 0, -1, -3, 0, 0, -2], 1.0, 4)
ONE = trajectory([4, 9, 3], ".xx", [0, -0.5, -1.5], 0.0)


def test_padded_by_hand() -> None:
    rows = pad_rows([TWO, ONE], multiple=4)
    assert rows["tokens"].tolist() == [[7, 8, 5, 2], [9, 6, 1, 0], [4, 9, 3, 0]]
    assert rows["targets"].tolist() == [[8, 5, 2, 0], [6, 1, 0, 0], [9, 3, 0, 0]]
    assert rows["behavior_logprobs"].tolist() == [[0, -1, -3, 0], [0, -2, 0, 0], [-0.5, -1.5, 0, 0]]
    assert rows["row_index"].tolist() == [[0] * 4, [0] * 4, [1] * 4]
    assert rows["lengths"].tolist() == [4, 3, 3]


def test_packed_by_hand() -> None:
    row = pack_rows([TWO, ONE], multiple=4)
    assert row["tokens"].tolist() == [[7, 8, 5, 2, 9, 6, 1, 0, 4, 9, 3, 0]]
    # The 2 that ends the first segment does not predict the 9 that begins the second.
    assert row["targets"].tolist() == [[8, 5, 2, 0, 6, 1, 0, 0, 9, 3, 0, 0]]
    assert row["target_mask"].int().tolist() == [[0, 1, 1, 0, 0, 1, 0, 0, 1, 1, 0, 0]]
    assert row["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 0, 1, 2, 0]]
    assert row["row_index"].tolist() == [[0] * 8 + [1] * 4]
    assert row["cu_seqlens"].tolist() == [0, 4, 8, 12]
    # Laid out as one segment, the second half would see the first: the wrong layout differs.
    as_one = trajectory([7, 8, 5, 2, 9, 6, 1], "..xx..x", [0, 0, -1, -3, 0, 0, -2], 1.0)
    assert pack_rows([as_one, ONE], multiple=4)["cu_seqlens"].tolist() == [0, 8, 12]


def test_a_segment_that_begins_with_an_action_is_refused() -> None:
    with pytest.raises(ValueError, match="each of its segments"):
        pack_rows([trajectory([1, 2, 3, 4], ".x.x", [0, -1, 0, -1], 1.0, 3)])


def step_loss(batch: list[Trajectory], layout: str, off_policy: float = 0.0, **settings: Any) -> tuple[float, list]:
    """The loss summed over microbatches, and which trajectories were admitted; `off_policy` nats on target 1."""
    algorithm = FlashReinforce(FlashReinforceSettings(**settings))
    batcher = LengthBatcher(BatchingSettings(12, 100, layout=layout, multiple=4, context_margin=0.0))
    total, admitted = 0.0, []
    for step in plan_steps(Batch(tuple(batch), 0), algorithm, batcher, dp_size=2, seed=0):
        for microbatch in step.microbatches:
            targets, mask, behavior, row = (
                microbatch[name].flatten() for name in ("targets", "target_mask", "behavior_logprobs", "row_index")
            )
            tokens = TokenBatch(
                behavior, mask, row, microbatch["advantages"], microbatch["token_weights"], microbatch["failures"]
            )
            logprobs = torch.where(mask, behavior + off_policy * (targets == 1), math.nan).requires_grad_()
            loss, stats = policy_loss(algorithm, logprobs, tokens)
            total += float(loss)
            admitted.append(float(stats["admitted"]))
    return total, sorted(admitted)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_rewards_1_and_0_have_the_mean_one_half(layout: str) -> None:
    """On-policy: A = +-1/2, -1/2 (1/2 / 3 (-1 - 3 - 2) - 1/2 / 2 (-0.5 - 1.5)) = -1/2 (-1 + 1/2) = 1/4.

    Counted as three trajectories the mean is 0.667, A = 1/3, 1/3, -2/3, T = 2, 1, 2 and B = 3:
    -1/3 (1/3 / 2 (-4) + 1/3 (-2) - 2/3 / 2 (-2)) = 2/9.
    """
    assert step_loss([TWO, ONE], layout)[0] == pytest.approx(1 / 4, rel=1e-6)
    apart = [
        trajectory([7, 8, 5, 2], "..xx", [0, 0, -1, -3], 1.0),
        trajectory([9, 6, 1], "..x", [0, 0, -2], 1.0),
        ONE,
    ]
    assert step_loss(apart, layout)[0] == pytest.approx(2 / 9, rel=1e-6)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_the_gate_looks_at_all_segments(layout: str) -> None:
    """Token 1, in the second segment, moves from -2 to -1.9: p = 0.1353, q = 0.1496, its divergence is 8.2e-4.

    Over the trajectory's three tokens D = 2.7e-4. A gate a segment would see 0 and 8.2e-4.
    """
    p, q = math.exp(-2), math.exp(-1.9)
    divergence = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    assert divergence == pytest.approx(8.18e-4, rel=1e-3)
    for delta, both in ((divergence / 3 * 1.01, 2.0), (divergence / 3 * 0.99, 1.0)):
        assert sum(step_loss([TWO, ONE], layout, off_policy=0.1, delta=delta)[1]) == both
    # Rejected, its first segment adds nothing either: what is left is -1/2 (-1/2 / 2) (-2).
    assert step_loss([TWO, ONE], layout, off_policy=0.1, delta=divergence / 3 * 0.99)[0] == pytest.approx(-1 / 4)


def test_a_plan_keeps_segments_together_and_counts_what_is_run() -> None:
    lengths = [[4, 3], [5], 3, [9, 9, 9], 2]
    for layout, build in (("packed", pack_rows), ("padded", pad_rows)):
        plan = LengthBatcher(BatchingSettings(16, 10, layout=layout, multiple=4, context_margin=0.0)).plan(lengths, 2)
        places = [list(p) for rank in plan.ranks for p in rank if p]
        assert sorted(i for p in places for i in p) == [0, 1, 2, 3, 4]
        assert [3] in places  # 36 tokens: alone
        if layout == "padded":
            assert [0] in places
        made = []
        for one in lengths:
            sizes = one if isinstance(one, list) else [one]
            starts = np.cumsum(sizes)[:-1].tolist()
            made.append(trajectory([1] * sum(sizes), "." * sum(sizes), [0.0] * sum(sizes), 0.0, *starts))
        run = sum(build([made[i] for i in p], 4)["tokens"].numel() for rank in plan.ranks for p in rank)
        assert plan.padding_share == pytest.approx(1 - 44 / run)


def test_the_context_bounds_a_segment_not_their_sum() -> None:
    def batcher(on_too_long: str) -> LengthBatcher:
        return LengthBatcher(BatchingSettings(100, 4, context_margin=0.0, on_too_long=on_too_long))

    assert batcher("error").plan([[4, 3], 3], 1).lengths == (4, 3)
    with pytest.raises(ValueError, match="trajectories \\[0\\] have \\[5\\]"):
        batcher("error").plan([[5, 3], 3], 1)
    plan = batcher("truncate").plan([[5, 3], 3], 1)
    assert (plan.lengths, plan.truncated) == ((4, 3), {"longer_than_context": 1})
    cut = truncate(TWO, 3)
    assert (cut.token_ids.tolist(), cut.segment_starts) == ([7, 8, 5, 9, 6, 1], (0, 3))
    assert cut.behavior_logprobs.tolist() == [0, 0, -1, 0, 0, -2]
    assert truncate(TWO, 4) is TWO
