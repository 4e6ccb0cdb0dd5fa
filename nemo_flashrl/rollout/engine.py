"""What the collector needs of a sampler, whichever it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import torch

from nemo_flashrl.records import Generation, Sampling

NamedTensors = Iterable[tuple[str, torch.Tensor]]


@runtime_checkable
class Engine(Protocol):
    """A sampler that takes token ids and returns token ids.

    Weights arrive as a stream of Hugging Face names and tensors, one at a time; an engine may not keep
    the tensors it is handed, only copies. `version` is the policy version it now serves; `faults` counts since the
    start, by reason, faults that were recovered from: retries, and `servers_lost`.
    """

    version: int
    faults: Counter[str]

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        """Continue `token_ids`. Many calls may be in flight at once."""
        ...

    async def load_weights(self, stream: NamedTensors, version: int) -> None:
        """Replace all weights, then serve them as `version`; on any error the old ones stay."""
        ...

    async def close(self) -> None:
        """Free what the engine holds; requests in flight fail."""
        ...
