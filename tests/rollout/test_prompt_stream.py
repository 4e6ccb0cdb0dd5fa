"""The order of prompts, and what a restart does to it."""

from __future__ import annotations

import pytest

from nemo_flashrl.rollout.prompts import PromptStream


def test_an_epoch_is_a_permutation() -> None:
    stream = PromptStream(7, seed=1)
    handed = [stream.next() for _ in range(21)]
    assert [index for index, _ in handed] == list(range(21))
    epochs = [[task for _, task in handed[i : i + 7]] for i in (0, 7, 14)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [PromptStream(7, seed=1).next() for _ in range(1)] == handed[:1]
    assert [PromptStream(7, seed=s).task_index(0) for s in range(9)] != [handed[0][1]] * 9
    with pytest.raises(ValueError, match="prompt set is empty: num_tasks=0"):
        PromptStream(0)


def test_a_resumed_stream_begins_with_what_was_in_flight() -> None:
    stream = PromptStream(5, seed=2)
    handed = dict(stream.next() for _ in range(6))
    for index in (0, 2, 5):
        stream.finish(index)
    state = stream.state_dict()
    resumed = PromptStream(5, seed=2)
    resumed.load_state_dict(state)
    again = [resumed.next() for _ in range(4)]
    assert [index for index, _ in again] == [1, 3, 4, 6]
    assert all(handed[index] == task for index, task in again[:3])
    assert resumed.state_dict()["unfinished"] == [1, 3, 4, 6]
    for other in (PromptStream(5, seed=3), PromptStream(6, seed=2)):
        with pytest.raises(ValueError, match=r"saved state has (seed=2, this run has 3|num_tasks=5, this run has 6)"):
            other.load_state_dict(state)
