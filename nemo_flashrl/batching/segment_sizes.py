"""What the segments of trajectories take up; a trajectory of several is planned as one piece.

Shapes: n = trajectories, G = segments of all of them together, those of a trajectory side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nemo_flashrl.batching.balancing import TokenCost


@dataclass(frozen=True, slots=True)
class SegmentSizes:
    """Tokens of every segment, and whose it is."""

    tokens: np.ndarray  # int64 [G]
    owner: np.ndarray  # int64 [G], ascending, in 0..n-1

    @classmethod
    def of(cls, lengths: Sequence[int | Sequence[int]]) -> SegmentSizes:
        """`lengths`: tokens of each trajectory, or of each of its segments."""
        parts = [length if isinstance(length, Sequence) else (length,) for length in lengths]
        tokens = np.array([tokens for part in parts for tokens in part], dtype=np.int64)
        return cls(tokens, np.repeat(np.arange(len(parts)), [len(part) for part in parts]))

    def at_most(self, limits: np.ndarray) -> SegmentSizes:
        """Each segment cut to its trajectory's limit, int64 [n]."""
        return replace(self, tokens=np.minimum(self.tokens, limits[self.owner]))

    def rounded(self, multiple: int) -> SegmentSizes:
        """Each segment padded."""
        return replace(self, tokens=-(-self.tokens // multiple) * multiple)

    def longest(self) -> np.ndarray:
        """int64 [n]: of each trajectory."""
        return np.maximum.reduceat(self.tokens, self._starts()) if len(self.tokens) else self.tokens

    def sums(self) -> np.ndarray:
        """int64 [n]: tokens of each trajectory."""
        return np.add.reduceat(self.tokens, self._starts()) if len(self.tokens) else self.tokens

    def counts(self) -> np.ndarray:
        """int64 [n]: segments of each trajectory."""
        return np.bincount(self.owner)

    def costs(self, cost: TokenCost) -> np.ndarray:
        """float64 [n]: attention stays inside a segment."""
        return np.bincount(self.owner, cost.of(self.tokens))

    def _starts(self) -> np.ndarray:
        return np.searchsorted(self.owner, np.arange(self.owner[-1] + 1))
