"""What the trainer needs of an algorithm: two pure functions of tensors, and a gate where there is one.

Legend: B = trajectories of the global batch, R = trajectories (rows) of one microbatch, N = tokens of one microbatch,
laid flat, padding included.

The loss of an optimizer step is a plain sum over action tokens,

    L = sum_i sum_t value[i, t],    value[i, t] = token_weights[i] * loss(logprob[i, t], ...)

with `token_weights` fixed by `weigh` over the whole batch before the first microbatch. Nothing is divided
later, so the split into microbatches, ranks and pipeline stages cannot change the result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ContextShare:
    """Context parallelism: the microbatch's tokens are spread over `group`, rows are the same on all of its ranks.

    What is decided about a whole trajectory has to be summed over the group, and a count of rows belongs to one rank
    alone; `tokens.trajectory_sums` and `tokens.counted_once` do both, with a group and without.
    """

    group: dist.ProcessGroup
    position: Tensor  # int64 [N], of each token in its trajectory


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """One microbatch as a loss sees it. Masked positions may hold anything, NaN too."""

    behavior_logprobs: Tensor  # float32 [N], the sampler's
    action_mask: Tensor  # bool [N]
    row: Tensor  # int64 [N], the trajectory of each token, in [0, R)
    advantages: Tensor  # float32 [R]
    token_weights: Tensor  # float32 [R], what one action token counts in the global loss; 0 on padding rows
    failures: Tensor  # bool [R], the environment's own flag
    reference_logprobs: Tensor | None = None  # float32 [N]
    kl_coefficient: float = 0.0  # of the KL to the reference in the loss, in this step
    entropies: Tensor | None = None  # float32 [N], only when the algorithm says `needs_entropy`
    context: ContextShare | None = None  # where other ranks hold further tokens of the same trajectories
    token_advantages: Tensor | None = None  # float32 [N], where a trajectory's turns have advantages of their own

    def advantages_at(self, tokens: slice = slice(None)) -> Tensor:
        """The advantages [n] of `batch[tokens]`."""
        return self.advantages[self.row[tokens]] if self.token_advantages is None else self.token_advantages[tokens]


@dataclass(frozen=True, slots=True)
class Gate:
    """What a whole trajectory's log-probs decide about its tokens."""

    keep: Tensor  # bool [N], tokens that enter the loss (a subset of action_mask)
    stats: dict[str, Tensor]  # float32 scalars, summed over microbatches and ranks; `*_max` are reduced by max
    per_row: dict[str, Tensor] = field(default_factory=dict)  # [R], what was decided about each trajectory, for logs


class Algorithm(Protocol):
    """A policy-gradient algorithm; `Settings` is a dataclass declared beside the class.

    One that remembers earlier batches has `state_dict`, `load_state_dict` and `next_batch()` too: the last is called
    once a batch, before `weigh`, which may be called again for the same batch with other rewards.
    """

    Settings: type
    needs_entropy: bool
    needs_reference: bool
    gates_trajectories: bool  # False: `gate` keeps the action mask whatever the log-probs, so one pass can do
    group_size: int  # rollouts per prompt; 1 where there are no groups

    def weigh(self, rewards: Tensor, action_counts: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages and token weights, both float32 [B], from float32 [B], int64 [B], int64 [B]."""
        ...

    def gate(self, logprobs: Tensor, batch: TokenBatch) -> Gate:
        """Decide over whole trajectories, from detached float32 [N] log-probs of the current policy."""
        ...

    def token_loss(self, logprobs: Tensor, batch: TokenBatch, keep: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        """(value, d value / d logprob), both float32 [n], of the n tokens `batch[tokens]`; 0 where not `keep`.

        The token weight is in both, so that the step's loss is the sum of the values.
        `logprobs` is [n], detached; `keep` is [N] and sliced here, like the fields of `batch`.
        """
        ...
