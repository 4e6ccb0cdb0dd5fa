"""A small value head: what a trajectory will earn, linear in one hidden state of the policy.

    x = (h - mean h) / |h|_rms / sqrt(H)       mean over all states that were seen
    V = w x + b,   loss = mean_i (V_i - R_i)^2,   a few Adam steps a batch

h is the last layer's state from which a trajectory's first trained token is predicted: it knows the prompt and nothing
of what is trained on, so that V is a baseline without bias. It is detached: nothing of this loss reaches the policy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ValueHead:
    """Predicts returns; begins at 0 everywhere.

    Args:
        learning_rate: of Adam.
        updates: Adam steps on each batch, after it was predicted.
    """

    def __init__(self, learning_rate: float = 0.01, updates: int = 4) -> None:
        self.learning_rate, self.updates = learning_rate, updates
        self._linear: torch.nn.Linear | None = None  # made when the size is known
        self._adam: torch.optim.Adam | None = None
        self._sum: Tensor | None = None  # [H], of normalised states
        self._count = 0

    def predict(self, states: Tensor) -> Tensor:
        """V [B], float32, of states [B, H]; no gradient."""
        self._make(states.shape[1])
        with torch.no_grad():
            return self._linear(self._inputs(states))[:, 0]

    def update(self, states: Tensor, returns: Tensor) -> float:
        """Learn from states [B, H] and what came of them, [B]; returns the loss before it."""
        self._make(states.shape[1])
        states = states.detach()
        self._sum += _normalised(states).sum(0)
        self._count += len(states)
        inputs, first = self._inputs(states), None
        with torch.enable_grad():
            for _ in range(self.updates):
                loss = (self._linear(inputs)[:, 0] - returns.float()).square().mean()
                first = float(loss) if first is None else first
                self._adam.zero_grad()
                loss.backward()
                self._adam.step()
        return first

    def state_dict(self) -> dict[str, Any]:
        """Nothing but a mark before the first batch."""
        if self._linear is None:
            return {"size": 0}
        return {
            "size": self._linear.in_features,
            "linear": self._linear.state_dict(),
            "adam": self._adam.state_dict(),
            "sum": self._sum,
            "count": self._count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state; the learning rate stays this run's."""
        if state["size"]:
            self._make(state["size"])
            self._linear.load_state_dict(state["linear"])
            self._adam.load_state_dict(state["adam"])
            self._adam.param_groups[0]["lr"] = self.learning_rate
            self._sum, self._count = state["sum"].clone(), state["count"]

    def _make(self, size: int) -> None:
        if self._linear is not None:
            return
        self._linear = torch.nn.utils.skip_init(torch.nn.Linear, size, 1)  # draws nothing from the run's randomness
        torch.nn.init.zeros_(self._linear.weight)
        torch.nn.init.zeros_(self._linear.bias)
        self._adam = torch.optim.Adam(self._linear.parameters(), lr=self.learning_rate)
        self._sum = torch.zeros(size)

    def _inputs(self, states: Tensor) -> Tensor:
        return _normalised(states) - self._sum / max(self._count, 1)


def _normalised(states: Tensor) -> Tensor:
    """Rows of norm 1; zeros where a trajectory has no state."""
    return torch.nn.functional.normalize(states.float(), dim=1)
