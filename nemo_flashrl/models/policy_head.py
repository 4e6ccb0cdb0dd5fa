"""The output layer of the last pipeline stage, answering with log-probs where targets are set.

It takes the place of the model's own ColumnParallelLinear by class alone: parameter, name, sharded state and
hooks stay as they were, so every checkpoint loads as before, and without targets it still yields logits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from megatron.core.models.gpt import GPTModel as MegatronGPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor

from nemo_flashrl.ops import fused_linear_logprob


class PolicyHead(ColumnParallelLinear):
    """Hidden states [S, B, H] -> log-probs of the set targets, float32 [S, B] (entropies beside them if asked)."""

    vocab_size: int  # the tokenizer's rows; what pads them up to the parallel multiple has probability 0
    temperature: float
    chunk_tokens: int
    _targets: Tensor | None = None
    _with_entropy: bool = False
    entropies: Tensor | None = None

    @classmethod
    def install(cls, model: MegatronGPTModel, *, vocab_size: int, temperature: float, chunk_tokens: int) -> None:
        """Turn the output layer of a last-stage model into this class, in place."""
        head = model.output_layer
        assert type(head) in (ColumnParallelLinear, cls), f"unknown output layer {type(head).__name__}"
        head.__class__ = cls
        head.vocab_size = vocab_size
        head.temperature = temperature
        head.chunk_tokens = chunk_tokens

    @contextlib.contextmanager
    def scoring(self, targets: Tensor, with_entropy: bool = False) -> Iterator[None]:
        """Within, a forward pass scores `targets`, int64 [B, S]: the token that each position predicts."""
        self._targets, self._with_entropy = targets, with_entropy
        try:
            yield
        finally:
            self._targets, self._with_entropy = None, False

    def forward(self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None):
        """As ColumnParallelLinear; with targets set, (log-probs [S, B], None) instead of (logits, bias)."""
        if self._targets is None:
            return super().forward(input_, weight, runtime_gather_output)
        targets = self._targets.transpose(0, 1)  # [S, B], Megatron's order
        scored = fused_linear_logprob(
            input_.reshape(-1, input_.shape[-1]),
            self.weight if weight is None else weight,
            targets.reshape(-1),
            tp_group=self.tp_group if self.tp_group.size() > 1 else None,
            vocab_size=self.vocab_size,
            temperature=self.temperature,
            chunk_tokens=self.chunk_tokens,
            sequence_parallel=self.sequence_parallel,
            return_entropy=self._with_entropy,
        )
        logprobs, self.entropies = scored if self._with_entropy else (scored, None)
        if self._with_entropy:
            self.entropies = self.entropies.view(targets.shape).transpose(0, 1)
        return logprobs.view(targets.shape), None


def find_head(module: torch.nn.Module) -> PolicyHead | None:
    """The head under NeMo's and Megatron's wrappers; None on a stage that is not the last."""
    while not isinstance(module, MegatronGPTModel):
        module = module.module
    return module.output_layer if module.post_process else None
