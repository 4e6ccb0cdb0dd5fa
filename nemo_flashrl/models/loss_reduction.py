"""Log-probs of a microbatch -> the loss that Megatron differentiates, and the step's statistics.

The algorithm's loss is a plain sum with global weights. Megatron divides by the number of microbatches and averages
over data-parallel ranks; both are multiplied back here, the one place that knows of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core import parallel_state
from nemo.lightning.megatron_parallel import MegatronLossReduction
from torch import Tensor

from nemo_flashrl.algorithms.algorithm import Algorithm, TokenBatch
from nemo_flashrl.algorithms.policy_loss import policy_loss

Stats = dict[str, Tensor]


def token_batch(batch: dict[str, Tensor], entropies: Tensor | None = None) -> TokenBatch:
    """A microbatch [R, S] laid flat, N = R * S."""
    return TokenBatch(
        behavior_logprobs=batch["behavior_logprobs"].reshape(-1),
        action_mask=batch["target_mask"].reshape(-1),
        row=batch["row_index"].reshape(-1),
        advantages=batch["advantages"],
        token_weights=batch["token_weights"],
        failures=batch["failures"],
        entropies=None if entropies is None else entropies.reshape(-1),
        reference_logprobs=batch["reference_logprobs"].reshape(-1) if "reference_logprobs" in batch else None,
    )


class PolicyLossReduction(MegatronLossReduction):
    """NeMo's loss seam for a policy-gradient algorithm."""

    def __init__(self, algorithm: Algorithm) -> None:
        super().__init__()
        self.algorithm = algorithm
        self.entropies: Tensor | None = None

    def forward(self, batch: dict[str, Tensor], forward_out: Tensor) -> tuple[Tensor, Stats]:
        """`forward_out`: float32 [R, S], the log-prob of each target."""
        loss, stats = policy_loss(self.algorithm, forward_out.reshape(-1), token_batch(batch, self.entropies))
        scale = int(batch["num_microbatches"]) * parallel_state.get_data_parallel_world_size()
        return loss * scale, stats

    def reduce(self, losses_reduced_per_micro_batch: Sequence[Stats]) -> Stats:
        """Sums (maxima for `*_max`) over microbatches and data-parallel ranks, float32 scalars."""
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
