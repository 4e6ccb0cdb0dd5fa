"""One microbatch as tensors: the shift to predicting positions, padding, segments, and rows that stand for nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_flashrl.batching.planner import BatchingSettings, LengthBatcher
from nemo_flashrl.data.collate import pack_rows, pad_rows, truncate
from nemo_flashrl.records import NO_VERSION, Trajectory

PER_TOKEN = ("tokens", "position_ids", "targets", "target_mask", "behavior_logprobs", "row_index")
DTYPES = {
    "tokens": torch.int64,
    "position_ids": torch.int64,
    "targets": torch.int64,
    "target_mask": torch.bool,
    "behavior_logprobs": torch.float32,
    "row_index": torch.int64,
    "lengths": torch.int32,
    "cu_seqlens": torch.int32,
    "max_seqlen": torch.int32,
}


def trajectory(tokens: list[int], mask: str, logprobs: list[float] | None = None) -> Trajectory:
    """`mask` has an x for each action token."""
    sampled = np.array([letter == "x" for letter in mask], dtype=bool)
    scores = np.array(logprobs if logprobs is not None else -np.arange(1, len(tokens) + 1), dtype=np.float32)
    return Trajectory(
        prompt_index=7,
        group=7,
        token_ids=np.array(tokens, dtype=np.int64),
        action_mask=sampled,
        behavior_logprobs=scores,
        versions=np.where(sampled, 3, NO_VERSION).astype(np.int32),
        reward=1.0,
        turns=1,
        end_reason="done",
        failed=False,
    )


FIRST = trajectory([7, 8, 5, 2], "..xx", [math.nan, math.nan, -1.0, -3.0])
SECOND = trajectory([4, 9, 6, 1, 3], ".x..x", [0, -0.5, math.inf, 0, -2.0])


class TestShift:
    def test_padded_by_hand(self):
        rows = pad_rows([FIRST, SECOND], multiple=4)
        assert rows["tokens"].tolist() == [[7, 8, 5, 2, 0, 0, 0, 0], [4, 9, 6, 1, 3, 0, 0, 0]]
        assert rows["targets"].tolist() == [[8, 5, 2, 0, 0, 0, 0, 0], [9, 6, 1, 3, 0, 0, 0, 0]]
        assert rows["target_mask"].int().tolist() == [[0, 1, 1, 0, 0, 0, 0, 0], [1, 0, 0, 1, 0, 0, 0, 0]]
        assert rows["behavior_logprobs"].tolist() == [[0, -1, -3, 0, 0, 0, 0, 0], [-0.5, 0, 0, -2, 0, 0, 0, 0]]
        assert rows["position_ids"].tolist() == [[0, 1, 2, 3, 0, 0, 0, 0], [0, 1, 2, 3, 4, 0, 0, 0]]
        assert rows["row_index"].tolist() == [[0] * 8, [1] * 8]
        assert rows["lengths"].tolist() == [4, 5]

    def test_packed_by_hand(self):
        row = pack_rows([FIRST, SECOND], multiple=4)
        assert row["tokens"].tolist() == [[7, 8, 5, 2, 4, 9, 6, 1, 3, 0, 0, 0]]
        # The last token of the first predicts nothing, least of all the first token of the second.
        assert row["targets"].tolist() == [[8, 5, 2, 0, 9, 6, 1, 3, 0, 0, 0, 0]]
        assert row["target_mask"].int().tolist() == [[0, 1, 1, 0, 1, 0, 0, 1, 0, 0, 0, 0]]
        assert row["behavior_logprobs"].tolist() == [[0, -1, -3, 0, -0.5, 0, 0, -2, 0, 0, 0, 0]]
        assert row["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 0, 0]]
        assert row["row_index"].tolist() == [[0] * 4 + [1] * 8]
        assert row["cu_seqlens"].tolist() == [0, 4, 12]
        assert row["max_seqlen"].item() == 8
        assert row["lengths"].tolist() == [4, 5]

    def test_scores_of_a_model_meet_the_sampler_s(self):
        """A sampler that scored token t by a table of (token before, token): the shifted fields find its numbers."""
        table = torch.log_softmax(torch.randn(10, 10, generator=torch.Generator().manual_seed(0)), dim=-1)
        tokens = [1, 4, 2, 8, 5, 7]
        scores = [0.0] + [float(table[a, b]) for a, b in zip(tokens[:-1], tokens[1:], strict=True)]
        for tensors in (
            pad_rows([trajectory(tokens, "..xx.x", scores)], 4),
            pack_rows([trajectory(tokens, "..xx.x", scores)], 4),
        ):
            output = table[tensors["tokens"]]  # what a model emits at each position: scores of the next token
            logprobs = output.gather(-1, tensors["targets"][..., None])[..., 0]
            mask = tensors["target_mask"]
            torch.testing.assert_close(logprobs[mask], tensors["behavior_logprobs"][mask], rtol=0, atol=0)
            assert mask.sum() == 3
            assert (tensors["targets"][mask] == torch.tensor([2, 8, 7])).all()

    def test_a_first_action_token_is_refused(self):
        for build in (pad_rows, pack_rows):
            with pytest.raises(ValueError, match="prompt 7 begins with an action token"):
                build([trajectory([1, 2], "x.")])


class TestRowsThatCarryNothing:
    @pytest.mark.parametrize("multiple", [1, 8])
    @pytest.mark.parametrize("build", [pad_rows, pack_rows])
    def test_an_empty_microbatch_is_one_masked_row(self, build, multiple):
        tensors = build([], multiple)
        for name in PER_TOKEN:
            assert tensors[name].shape == (1, multiple)
            assert not tensors[name].any()
        assert tensors["lengths"].tolist() == [0]
        if build is pack_rows:
            assert tensors["cu_seqlens"].tolist() == [0, multiple] and tensors["max_seqlen"] == multiple

    @pytest.mark.parametrize("build", [pad_rows, pack_rows])
    def test_without_an_action_token_all_is_masked_and_finite(self, build):
        tensors = build([trajectory([1, 2, 3], "...", [math.nan, math.inf, -math.inf])], 2)
        assert not tensors["target_mask"].any()
        assert not tensors["behavior_logprobs"].any()
        assert tensors["tokens"].flatten().tolist() == [1, 2, 3, 0]

    @pytest.mark.parametrize("build", [pad_rows, pack_rows])
    def test_a_single_token_predicts_nothing(self, build):
        tensors = build([trajectory([6], ".")])
        assert tensors["tokens"].tolist() == [[6]] and not tensors["target_mask"].any()


class TestBothLayouts:
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(
        masks=st.lists(st.text(alphabet=".x", max_size=12).map(lambda rest: "." + rest), min_size=1, max_size=5),
        multiple=st.sampled_from([1, 2, 8]),
    )
    def test_every_trajectory_is_found_again(self, masks, multiple):
        rng = np.random.default_rng(0)
        made = [trajectory(rng.integers(1, 99, len(mask)).tolist(), mask) for mask in masks]
        padded, packed = pad_rows(made, multiple), pack_rows(made, multiple)
        for name in (*PER_TOKEN, "lengths"):
            assert padded[name].dtype == packed[name].dtype == DTYPES[name]
        assert padded["tokens"].shape[1] % multiple == packed["tokens"].shape[1] % multiple == 0
        begins = packed["cu_seqlens"].tolist()
        assert all(b % multiple == 0 for b in begins) and begins[-1] == packed["tokens"].shape[1]
        assert packed["max_seqlen"] == packed["cu_seqlens"].diff().max()
        for r, one in enumerate(made):
            alone = pad_rows([one], 1)
            length = len(one.token_ids)
            for name in PER_TOKEN:
                if name == "row_index":
                    continue
                expected = alone[name][0]
                torch.testing.assert_close(padded[name][r, :length], expected, rtol=0, atol=0)
                torch.testing.assert_close(packed[name][0, begins[r] : begins[r] + length], expected, rtol=0, atol=0)
            assert not padded["target_mask"][r, length:].any()
            assert not packed["target_mask"][0, begins[r] + length : begins[r + 1]].any()
            assert (packed["row_index"][0, begins[r] : begins[r + 1]] == r).all()
        assert int(padded["target_mask"].sum()) == int(packed["target_mask"].sum()) == sum(t.action_count for t in made)

    @pytest.mark.parametrize(("layout", "build"), [("packed", pack_rows), ("padded", pad_rows)])
    def test_a_plan_counts_the_tokens_that_are_run(self, layout, build):
        lengths = [13, 40, 2, 27, 5, 5, 39, 1]
        plan = LengthBatcher(BatchingSettings(48, 100, layout=layout, multiple=4)).plan(lengths, dp_size=3)
        made = [trajectory([1] * length, "." * length) for length in lengths]
        run = sum(build([made[i] for i in places], 4)["tokens"].numel() for rank in plan.ranks for places in rank)
        assert plan.padding_share == pytest.approx(1 - sum(lengths) / run)

    def test_ranks_with_nothing_to_learn_have_every_field(self):
        """A rank without action tokens, one without trajectories, one with work: the same fields, a finite gradient."""
        made = [trajectory([1, 2, 3], "..."), trajectory([1, 2, 3], "..x")]
        plan = LengthBatcher(BatchingSettings(4, 100, multiple=4)).plan([3, 3], dp_size=3)
        microbatches = [pad_rows([made[i] for i in rank[0]], 4) for rank in plan.ranks]
        assert len({tuple(sorted(m)) for m in microbatches}) == 1
        assert sorted(int(m["target_mask"].sum()) for m in microbatches) == [0, 0, 1]
        for m in microbatches:
            logprobs = torch.full(m["tokens"].shape, math.nan).masked_fill(m["target_mask"], -1.0).requires_grad_()
            loss = torch.where(m["target_mask"], logprobs, 0.0).sum()
            loss.backward()
            assert torch.isfinite(loss) and torch.isfinite(logprobs.grad).all()


class TestTruncate:
    def test_cuts_every_field_and_keeps_the_rest(self):
        cut = truncate(SECOND, 3)
        assert cut.token_ids.tolist() == [4, 9, 6]
        assert cut.action_mask.tolist() == [False, True, False]
        assert len(cut.behavior_logprobs) == len(cut.versions) == 3
        assert (cut.reward, cut.prompt_index, cut.end_reason) == (1.0, 7, "done")
        assert cut.action_count == 1 and SECOND.action_count == 2

    def test_leaves_a_short_one_alone(self):
        assert truncate(FIRST, 4) is FIRST
