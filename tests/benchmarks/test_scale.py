"""The simulation behind docs/scale.md, where its answer can be derived by hand."""

from __future__ import annotations

import pytest
from scale_simulation import Rollouts, simulate

# 100 tokens, half of them sampled, 10 a second, and two turns of 2.5 s: 10 s an episode.
ROLLOUTS = Rollouts(32, rate=10, mean_tokens=100, context=10_000, action_share=0.5, turns=2, tool_seconds=2.5)


def test_a_slow_trainer_sets_the_pace() -> None:
    """32 at a time give a batch of 16 every 5 s; the trainer needs 100 + 1."""
    run = simulate(ROLLOUTS, batch=16, train=100, refit=1, max_staleness=4)
    assert run.seconds == pytest.approx(100 * 59 / 60 + 1 * 59 / 60, rel=0.02)  # the last step is begun, not ended
    assert run.waiting < 0.01
    assert run.dropped == 0
    assert 1 < run.staleness <= 4  # two batches wait in line


def test_slow_rollouts_set_the_pace() -> None:
    run = simulate(ROLLOUTS, batch=16, train=0.01, refit=0, max_staleness=100, steps=400)
    assert run.seconds == pytest.approx(16 * 10 / 32, rel=0.05)
    assert run.waiting > 0.99


def test_what_is_too_old_is_dropped() -> None:
    """Eight batches in flight are eight versions old when they end; a bound of 2 must drop most of them."""
    many = Rollouts(128, rate=10, mean_tokens=100, context=10_000, action_share=0.5, turns=2, tool_seconds=2.5)
    run = simulate(many, batch=16, train=0.01, refit=0, max_staleness=2, steps=200)
    assert run.dropped > 0.3
    assert run.staleness <= 2
