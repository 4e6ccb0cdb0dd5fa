"""A piecewise-linear penalty on length, taken off a trajectory's advantage.

    penalty = c * max(0, length / limit - 1),    c = coefficient * max(0, 1 - step / decay_steps)

Nothing is taken below the limit, so that a policy is not pushed to be short where it has room; c stays where
`decay_steps` is 0. What a length counts (tokens, turns, tokens that are new) is the caller's choice.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LengthPenalty:
    """The penalty of lengths beyond `limit`.

    >>> LengthPenalty(0.5, limit=100, decay_steps=10)(torch.tensor([100, 150, 300]), step=5)
    tensor([0.0000, 0.1250, 0.5000])
    """

    coefficient: float  # of a length twice the limit, at step 0
    limit: float
    decay_steps: int = 0  # optimizer steps until nothing is left of it; 0: it does not decay

    def __call__(self, lengths: Tensor, step: int) -> Tensor:
        """The penalties, float32 [B], of lengths [B] in a batch that is trained on after `step` steps."""
        left = max(0.0, 1 - step / self.decay_steps) if self.decay_steps else 1.0
        return self.coefficient * left * (lengths.float() / self.limit - 1).clamp(min=0)
