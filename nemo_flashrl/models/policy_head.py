"""The output layer of the last pipeline stage, answering with log-probs or with a policy loss instead of logits.

It takes the place of the model's own ColumnParallelLinear by class alone: parameter, name, sharded state and
hooks stay as they were, so every checkpoint loads as before, and without a request it still yields logits.

Legend: R = rows of a microbatch, S = row length, N = S * R positions in Megatron's order, sequence first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from megatron.core.models.gpt import GPTModel as MegatronGPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor

from nemo_flashrl.algorithms.algorithm import Algorithm, TokenBatch
from nemo_flashrl.ops import fused_linear_gated_policy_loss, fused_linear_logprob, fused_linear_policy_loss


@dataclass(frozen=True)
class HeadSettings:
    """How the head computes; the numbers do not depend on the last two."""

    vocab_size: int  # rows that are tokens; what pads them up to the parallel multiple has probability 0
    temperature: float = 1.0  # the sampler's, where a microbatch does not tell its trajectories' own
    chunk_tokens: int | None = None  # tokens whose logits are alive at a time; None: by device and shape
    logits_budget_bytes: int = 64 * 2**20  # a microbatch whose logits fit saves their second product


@dataclass
class PolicyRequest:
    """One microbatch to be trained on, and what the head says of it beside the loss."""

    algorithm: Algorithm
    batch: TokenBatch  # N positions
    loss_scale: float  # the gradient that the loss will be given
    grad_hooks: bool = False  # gradients are reduced under the backward pass: its hooks must see the weight
    stats: dict[str, Tensor] = field(default_factory=dict)


def flat(values: Tensor) -> Tensor:
    """[R, S] -> [N]: the one place that knows the head's order."""
    return values.transpose(0, 1).reshape(-1)


class PolicyHead(ColumnParallelLinear):
    """Hidden states [S, R, H] -> logits, log-probs float32 [S, R] (with entropies [S, R, 2]), or a loss [1, 1]."""

    settings: HeadSettings
    _targets: Tensor | None = None  # int64 [R, S]
    _request: PolicyRequest | None = None
    _entropies: bool = False
    _temperatures: Tensor | None = None  # float64 [R, S]

    @classmethod
    def install(cls, model: MegatronGPTModel, settings: HeadSettings) -> None:
        """Turn the output layer of a last-stage model into this class, in place."""
        head = model.output_layer
        assert type(head) in (ColumnParallelLinear, cls), f"unknown output layer {type(head).__name__}"
        head.__class__ = cls
        head.settings = settings

    @contextlib.contextmanager
    def scoring(
        self,
        targets: Tensor,
        request: PolicyRequest | None = None,
        *,
        entropies: bool = False,
        temperatures: Tensor | None = None,
    ) -> Iterator[None]:
        """Within, a forward pass answers with log-probs of `targets`, int64 [R, S]; with a request, with its loss.

        `temperatures` float64 [R, S] go before the settings' one.
        """
        self._targets, self._request, self._entropies = targets, request, entropies
        self._temperatures = temperatures
        try:
            yield
        finally:
            self._targets = self._request = self._temperatures = None

    def forward(self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None):
        """As ColumnParallelLinear; in `scoring`, (what was asked for, None) instead of (logits, bias)."""
        if self._targets is None:
            return super().forward(input_, weight, runtime_gather_output)
        hidden = input_.reshape(-1, input_.shape[-1])
        weight = self.weight if weight is None else weight
        if self._request is not None:
            return self._policy_loss(hidden, weight, self._request).view(1, 1), None
        options = {**self._options(), "return_entropy": self._entropies}
        answer = fused_linear_logprob(hidden, weight, flat(self._targets), **options)
        shape = self._targets.shape[::-1]
        if self._entropies:
            return torch.stack(answer, -1).view(*shape, 2), None
        return answer.view(shape), None

    def _options(self) -> dict:
        return {
            "tp_group": self.tp_group if self.tp_group.size() > 1 else None,
            "vocab_size": self.settings.vocab_size,
            "temperature": self._temperature(),
            "chunk_tokens": self.settings.chunk_tokens,
            "sequence_parallel": self.sequence_parallel,
        }

    def _temperature(self) -> float | Tensor:
        """One number where it will do: on a CPU it is then a factor of the product and no pass over the logits."""
        if self._temperatures is None:
            return self.settings.temperature
        first = self._temperatures.flatten()[0]
        is_one = not any(self._temperatures.stride())  # one number, expanded
        return float(first) if is_one else flat(self._temperatures)

    def _policy_loss(self, hidden: Tensor, weight: Tensor, request: PolicyRequest) -> Tensor:
        algorithm, batch = request.algorithm, request.batch

        def gate(logprobs: Tensor, entropies: Tensor | None) -> Tensor:
            decided = algorithm.gate(logprobs, replace(batch, entropies=entropies))
            request.stats = decided.stats
            return decided.keep

        def token_loss(logprobs: Tensor, keep: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
            return algorithm.token_loss(logprobs, batch, keep, tokens)

        options = {
            **self._options(),
            "mask": batch.action_mask,
            "return_entropy": algorithm.needs_entropy,
            "loss_scale": request.loss_scale,
            "grad_weight": _fp32_main_grad(weight) if torch.is_grad_enabled() else None,
            "on_grad_weight": lambda: _gradient_is_in_main_grad(weight, request.grad_hooks),
        }
        targets = flat(self._targets)
        if algorithm.gates_trajectories:
            budget = self.settings.logits_budget_bytes
            result = fused_linear_gated_policy_loss(
                hidden, weight, targets, gate, token_loss, logits_budget_bytes=budget, **options
            )
        else:
            keep = batch.action_mask
            result = fused_linear_policy_loss(
                hidden, weight, targets, lambda logprobs, tokens: token_loss(logprobs, keep, tokens), **options
            )
            gate(result[1], result[2] if algorithm.needs_entropy else None)  # for its statistics
        return result[0]


def _fp32_main_grad(weight: Tensor) -> Tensor | None:
    """What the head may sum into chunk by chunk; bf16 would round each of them, so DDP adds the whole sum there."""
    main_grad = getattr(weight, "main_grad", None)
    return None if main_grad is None or main_grad.dtype == torch.bfloat16 else main_grad


def _gradient_is_in_main_grad(weight: Tensor, hooks: bool) -> Tensor | None:
    """Tell Megatron's DDP, as its own fused accumulation does; what autograd is handed then counts for nothing.

    A tied embedding's own gradient still comes through autograd: Megatron marks the weight `zero_out_wgrad` and adds
    what it finds, so a stand-in has to be zero there.
    """
    tied = getattr(weight, "zero_out_wgrad", False)
    weight.grad_added_to_main_grad = not tied
    if not hooks:
        return None
    return torch.zeros_like(weight) if tied else torch.empty_like(weight)


def temperatures_of(microbatch: dict[str, Tensor]) -> Tensor | None:
    """What each position's trajectory was sampled at, float64 [R, S]; None where the trajectories do not tell.

    Where all were sampled at one temperature it is that number, seen from everywhere, and stays on the host.
    """
    temperatures = microbatch.get("temperatures")
    if temperatures is None:
        return None
    rows = microbatch["row_index"]
    if bool((temperatures == temperatures[0]).all()):
        return temperatures[0].expand(rows.shape)
    return temperatures.to(rows.device)[rows]


def find_head(module: torch.nn.Module) -> PolicyHead | None:
    """The head under NeMo's and Megatron's wrappers; None on a stage that is not the last."""
    while not isinstance(module, MegatronGPTModel):
        module = module.module
    return module.output_layer if module.post_process else None
