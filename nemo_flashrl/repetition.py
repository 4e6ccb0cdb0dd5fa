"""Which tokens of a sequence have been there before."""

from __future__ import annotations

import numpy as np

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
