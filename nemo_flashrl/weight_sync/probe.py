"""A fixed text whose log-probs the trainer knows: what a sampler must agree with after every sync of weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

NamedTensors = Iterable[tuple[str, torch.Tensor]]  # Hugging Face names; one tensor at a time
PROBE_TOKENS = 64  # a multiple of every usual tensor-parallel size, which sequence parallelism asks for


@dataclass(slots=True)
class Probe:
    """Log-probs of a model's own distribution, at temperature 1, under the weights that it comes with."""

    token_ids: tuple[int, ...]  # [S]
    logprobs: tuple[float, ...]  # [S - 1], of token_ids[1:]
    tolerance: float  # nats, on the mean absolute difference
    largest: float | None = None  # nats, the largest such difference of a server that passed; None before the first

    def distance(self, logprobs: Sequence[float]) -> float:
        """Mean absolute difference in nats; inf where `logprobs` has a NaN."""
        differences = [abs(a - b) for a, b in zip(self.logprobs, logprobs, strict=True)]
        mean = sum(differences) / len(differences)
        return mean if math.isfinite(mean) else math.inf


@dataclass(frozen=True, slots=True)
class ProbedWeights:
    """A stream of Hugging Face names and tensors, and the probe that they must pass."""

    tensors: NamedTensors
    probe: Probe

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors)


def probe_token_ids(vocab_size: int) -> tuple[int, ...]:
    """The same tokens of a vocabulary every time, spread over all of it."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(0, vocab_size, (PROBE_TOKENS,), generator=generator).tolist())
