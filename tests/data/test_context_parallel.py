"""Trajectories spread over context-parallel ranks: who holds what, and decisions about the whole."""

from __future__ import annotations

import pytest
import torch
from processes import run_ranks
from tiny import random_trajectories

from nemo_flashrl.data.collate import pack_rows, pad_rows
from nemo_flashrl.data.context_parallel import context_share, held_positions, length_multiple


def test_each_rank_holds_a_chunk_from_either_end() -> None:
    assert held_positions(8, 0, 2).tolist() == [0, 1, 6, 7]
    assert held_positions(8, 1, 2).tolist() == [2, 3, 4, 5]
    assert [held_positions(8, rank, 4).tolist() for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert held_positions(3, 0, 1).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("tensor", "sequence", "context", "multiple"),
    [
        (1, False, 1, 1),
        (4, True, 1, 4),
        (4, False, 1, 1),
        (1, False, 2, 4),  # two chunks a rank
        (2, True, 2, 4),  # a share of 2 tokens is one for each tensor rank
        (4, True, 2, 8),  # the least common multiple of 4 and 2 * 2 would leave shares of 2 tokens for 4 ranks
        (3, True, 2, 12),
    ],
)
def test_the_multiple_lets_every_rank_have_equal_chunks(tensor, sequence, context, multiple) -> None:
    assert length_multiple(tensor, sequence, context) == multiple
    share = multiple // context
    assert context == 1 or share % 2 == 0
    assert not sequence or share % tensor == 0


def test_fp8_products_sum_over_a_multiple_of_16_tokens() -> None:
    assert [length_multiple(t, s, c, fp8=True) for t, s, c in ((1, False, 1), (3, True, 1), (2, True, 2))] == [
        16,
        48,
        32,
    ]


def test_segments_of_a_packed_row_are_cut_one_by_one() -> None:
    short, long = (
        [t for t in random_trajectories(40, 50) if len(t.token_ids) in lengths][0] for lengths in ((7, 8), (13,))
    )
    row = pack_rows([short, long], multiple=4)
    share = context_share(row, 1, 2)
    assert row["cu_seqlens"].tolist() == share["cu_seqlens"].tolist() == [0, 8, 24]
    expected = [2, 3, 4, 5, *range(8 + 4, 8 + 12)]
    for name in ("tokens", "position_ids", "targets", "target_mask", "behavior_logprobs", "row_index"):
        assert torch.equal(share[name][0], row[name][0, expected]), name


@pytest.mark.parametrize("lay_out", [pad_rows, pack_rows])
@pytest.mark.parametrize("size", [2, 3])
def test_every_target_is_held_once(lay_out, size: int) -> None:
    """Shifted before the cut: a target is its token's successor in the trajectory, on whichever rank that is."""
    whole = lay_out(random_trajectories(5, 50, seed=1), multiple=2 * size)
    shares = [context_share(whole, rank, size) for rank in range(size)]

    def triples(part):
        fields = [part[name][part["target_mask"]].tolist() for name in ("row_index", "position_ids", "targets")]
        return sorted(zip(*fields, strict=True))

    assert sorted(t for share in shares for t in triples(share)) == triples(whole)
    assert {share["tokens"].numel() for share in shares} == {whole["tokens"].numel() // size}


def test_gates_and_filters_see_whole_trajectories() -> None:
    run_ranks(2, "context_gate")
