"""The loss of a microbatch -> what Megatron differentiates, and the step's statistics.

The algorithm's loss is a plain sum with global weights. Megatron divides by the number of microbatches and averages
over data-parallel and context-parallel ranks; all is multiplied back here, the one place that knows of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core import parallel_state
from nemo.lightning.megatron_parallel import MegatronLossReduction
from torch import Tensor

from nemo_flashrl.algorithms.algorithm import ContextShare, TokenBatch
from nemo_flashrl.models.policy_head import PolicyRequest, flat

Stats = dict[str, Tensor]


def token_batch(batch: dict[str, Tensor]) -> TokenBatch:
    """A microbatch [R, S] as the head sees it."""
    reference, by_token = batch.get("reference_logprobs"), batch.get("token_advantages")
    group = parallel_state.get_context_parallel_group()
    return TokenBatch(
        behavior_logprobs=flat(batch["behavior_logprobs"]),
        action_mask=flat(batch["target_mask"]),
        row=flat(batch["row_index"]),
        advantages=batch["advantages"],
        token_weights=batch["token_weights"],
        failures=batch["failures"],
        reference_logprobs=None if reference is None else flat(reference),
        context=ContextShare(group, flat(batch["position_ids"])) if group.size() > 1 else None,
        token_advantages=None if by_token is None else flat(by_token),
        kl_coefficient=float(batch.get("kl_coefficient", 0.0)),
    )


def loss_scale() -> float:
    """The gradient that a microbatch's loss is given: what undoes the average over ranks."""
    return float(parallel_state.get_data_parallel_world_size(with_context_parallel=True))


class PolicyLossReduction(MegatronLossReduction):
    """NeMo's loss seam; the head has formed the loss, here it gets its scale and its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.request: PolicyRequest | None = None  # of the microbatch whose loss comes next

    def forward(self, batch: dict[str, Tensor], forward_out: Tensor) -> tuple[Tensor, Stats]:
        """`forward_out`: the microbatch's loss, float32 [1, 1]."""
        loss = forward_out.sum()
        stats = {**self.request.stats, "loss": loss.detach().clone()}
        # Megatron's schedule multiplies by the context-parallel size itself.
        left = loss_scale() / parallel_state.get_context_parallel_world_size()
        return loss * (left * int(batch["num_microbatches"])), stats

    def reduce(self, losses_reduced_per_micro_batch: Sequence[Stats]) -> Stats:
        """Sums (maxima for `*_max`) over microbatches and ranks, float32 scalars."""
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        reduced: Stats = {}
        for kind, operation in (("sum", torch.distributed.ReduceOp.SUM), ("max", torch.distributed.ReduceOp.MAX)):
            names = sorted(n for n in losses_reduced_per_micro_batch[0] if n.endswith("_max") == (kind == "max"))
            if not names:
                continue
            table = torch.stack(
                [torch.stack([stats[n].float() for n in names]) for stats in losses_reduced_per_micro_batch]
            )
            values = table.amax(0) if kind == "max" else table.sum(0)
            torch.distributed.all_reduce(values, op=operation, group=group)
            reduced.update(zip(names, values.unbind(), strict=True))
        return reduced
