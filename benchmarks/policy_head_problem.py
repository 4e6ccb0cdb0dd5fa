"""What every definition of the policy head is given: inputs of one size, and the loss."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from nemo_flashrl.ops import fused_linear_logprob


class Problem:
    """Inputs of one size: hidden `[T, H]`, weight `[V, H]`, targets `[T]`, and a REINFORCE loss with token ratios."""

    def __init__(
        self,
        tokens: int,
        hidden_size: int,
        vocab_size: int,
        chunk: int,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        spread: float = 0.05,  # of the weight's numbers
        generator: torch.Generator | None = None,
    ):
        self.chunk = chunk
        drawn = {"generator": generator or torch.Generator(device).manual_seed(0), "device": device}
        self.hidden = torch.randn(tokens, hidden_size, dtype=dtype, **drawn).requires_grad_()
        weight = torch.randn(vocab_size, hidden_size, dtype=dtype, **drawn)
        self.weight = (weight * spread).requires_grad_()
        self.targets = torch.randint(vocab_size, (tokens,), **drawn)
        self.advantages = torch.randn(tokens, **drawn)
        with torch.no_grad():
            self.behavior = fused_linear_logprob(self.hidden, self.weight, self.targets, chunk_tokens=chunk)
            self.behavior += 0.05 * torch.randn(tokens, **drawn)

    def as_dtype(self, dtype: torch.dtype) -> Problem:
        """The same numbers, of hidden states and weight, in another dtype."""
        other = copy.copy(self)
        other.hidden, other.weight = (t.detach().to(dtype).requires_grad_() for t in (self.hidden, self.weight))
        return other

    def live(self, share: float) -> Tensor:
        """Bool [T]: this share of the tokens."""
        return (torch.rand(self.targets.shape, generator=torch.Generator().manual_seed(1)) < share).to(
            self.hidden.device
        )

    def clear(self) -> None:
        self.hidden.grad = self.weight.grad = None

    def loss(self, logprobs: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        coefficient = -self.advantages[tokens] * torch.exp(logprobs - self.behavior[tokens])
        return coefficient * logprobs, coefficient

    def plain_loss(self, logprobs: Tensor) -> Tensor:
        ratio = torch.exp(logprobs.detach() - self.behavior)
        return -(self.advantages * ratio * logprobs).sum()
