"""The driver: what is saved, what counts as trained."""

from __future__ import annotations

import json

import pytest
from doubles import ScriptedEngine
from test_rollout import GET, collector, numbers

from nemo_flashrl.rollout.driver import RolloutDriver


def driver(lag: int = 0, **settings) -> RolloutDriver:
    engine = ScriptedEngine(GET)
    return RolloutDriver(engine, collector(engine, batch_size=4, **{"max_in_flight": 4, **settings}), lag=lag)


@pytest.mark.parametrize("lag", [0, 2])
def test_a_prompt_is_finished_when_its_batch_was_trained(lag: int) -> None:
    """Two batches of four trained, a third in training, `lag` more collected ahead: 8 prompts are done for good."""
    before = driver(lag)
    try:
        for version in range(3):
            assert numbers(before.collect(version)) == [4 * version + i for i in range(4)]
            if version < 2:
                before.trained()
        state = json.loads(json.dumps(before.state_dict()))  # plain data
    finally:
        before.close()
    assert state["prompts"]["position"] == 12 + 4 * lag
    assert state["prompts"]["unfinished"] == list(range(8, 12 + 4 * lag))
    assert state["totals"] == {"trajectories_trained": 8}
    after = driver(lag)
    after.load_state_dict(state)
    try:
        assert numbers(after.collect(2)) == [8, 9, 10, 11]
        after.trained()
        assert after.state_dict()["totals"] == {"trajectories_trained": 12}
        with pytest.raises(AssertionError, match="no batch is in training"):
            after.trained()
    finally:
        after.close()
