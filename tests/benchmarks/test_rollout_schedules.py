"""The benchmark of schedulers: its clock, and what it counts."""

from __future__ import annotations

import numpy as np
import pytest
import rollouts


def test_schedules_by_hand() -> None:
    """Eight slots, groups of one episode of 10 s and seven of 1 s. Behind a barrier or with held slots a group takes
    10 s: 0.8 trajectories/s, busy for 17 of 80 slot-seconds. Slots that are freed at once are never idle: each makes
    8 trajectories in 17 s, up to which episodes fall into the window."""
    group = [np.full(10, 1.0), *[np.ones(1)] * 7]
    workload = rollouts.Workload(group * 40)
    outcomes = {s: rollouts.simulate(s, workload, 8, 0.0) for s in rollouts.SCHEDULERS}
    for held in ("(a) barrier", "(b) hold"):
        assert outcomes[held].trajectories_per_second == pytest.approx(0.8)
        assert outcomes[held].idle == pytest.approx(1 - 17 / 80)
    for freed in ("streaming", "(c) refill"):
        assert outcomes[freed].idle < 0.03
        assert outcomes[freed].trajectories_per_second == pytest.approx(8 * 8 / 17, rel=0.1)
    assert outcomes["(a) barrier"].oldest == 0
    assert outcomes["streaming"].oldest > 0


def test_training_is_part_of_a_barrier() -> None:
    """Training for as long as the busy workers would take a batch, 17 / 8 s, comes on top of the barrier's 10 s, and
    under the rollouts of a stream, which is not slower for it."""
    workload = rollouts.Workload([np.full(10, 1.0), *[np.ones(1)] * 7] * 40)
    barrier, streaming = (rollouts.simulate(s, workload, 8, 1.0) for s in ("(a) barrier", "streaming"))
    assert barrier.trajectories_per_second == pytest.approx(8 / (10 + 17 / 8))
    assert streaming.trajectories_per_second > 0.8 * 8 * 8 / 17
