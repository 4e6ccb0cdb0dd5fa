"""How much a policy repeats itself: inside a trajectory, and over the samples of one prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nemo_flashrl.records import Trajectory
from nemo_flashrl.repetition import NGRAM, repeated_tokens


def repeated_token_share(trajectory: Trajectory, ngram: int = NGRAM) -> float:
    """Share of the action tokens that lie in an n-gram of action tokens that the trajectory has had before.

    Twelve tokens a..l and the first ten of them again: 10 of 22 repeat.
    """
    repeats = repeated_tokens(trajectory.token_ids[trajectory.action_mask], ngram)
    return float(repeats.mean()) if len(repeats) else 0.0


def unique_sample_share(group: Sequence[Trajectory]) -> float:
    """Of the samples of one prompt, those whose actions differ: 1 when all do, 1 / G when all are the same."""
    return len({t.token_ids[t.action_mask].tobytes() for t in group}) / len(group)


def distinct_answers(trajectories: Sequence[Trajectory]) -> int:
    """Different last actions (the tokens after the last observation or prompt)."""
    return len({last_action(t).tobytes() for t in trajectories})


def last_action(trajectory: Trajectory) -> np.ndarray:
    """The tokens of the last action, int64; none where the policy sampled none."""
    places = np.flatnonzero(trajectory.action_mask)
    if not len(places):
        return trajectory.token_ids[:0]
    breaks = np.flatnonzero(np.diff(places) > 1)
    start = places[breaks[-1] + 1] if len(breaks) else places[0]
    return trajectory.token_ids[start : places[-1] + 1]
