"""How much a policy repeats itself: inside a trajectory, and over the samples of one prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nemo_flashrl.records import Trajectory

NGRAM = 8  # longer than the fixed part of a tool call, shorter than a call with its arguments done twice
_BASE = np.uint64(6364136223846793005)  # odd, of a full-period generator modulo 2**64


def repeated_tokens(tokens: np.ndarray, ngram: int = NGRAM) -> np.ndarray:
    """bool [A]: the tokens, int64 [A], that lie in an n-gram which begins earlier too.

    Twelve tokens a..l and the first ten of them again: the last 10 of 22 repeat.

    N-grams are compared by a 64-bit polynomial hash: of a million, two fall together with probability 3e-8.
    """
    count = len(tokens) - ngram + 1
    if count < 2:
        return np.zeros(len(tokens), dtype=bool)
    words = tokens.astype(np.uint64) + np.uint64(1)
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(ngram):
        hashes = hashes * _BASE + words[offset : offset + count]  # wraps modulo 2**64
        hashes ^= hashes >> np.uint64(29)
    repeats = np.ones(count, dtype=bool)
    repeats[np.unique(hashes, return_index=True)[1]] = False
    covered = np.zeros(len(tokens) + 1, dtype=np.int64)
    np.add.at(covered, np.flatnonzero(repeats), 1)
    np.add.at(covered, np.flatnonzero(repeats) + ngram, -1)
    return covered.cumsum()[:-1] > 0


def new_tokens(trajectory: Trajectory) -> int:
    """Action tokens that say something new: by the trajectory's `repeats` where they were measured, else by n-grams."""
    if trajectory.repeats is not None:
        return int((trajectory.action_mask & ~trajectory.repeats).sum())
    return int((~repeated_tokens(trajectory.token_ids[trajectory.action_mask])).sum())


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
