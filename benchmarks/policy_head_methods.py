"""One policy-gradient loss over an output layer, forward and backward, by every definition of it that is compared.

`naive` is autograd over full logits; `checkpoint` the same per chunk of tokens under torch.utils.checkpoint; `liger` is
LigerFusedLinearGRPOLoss of the PyPI package liger-kernel, its plain torch path, in chunks of equal size; `trl` is TRL's
`selective_log_softmax` over full logits and `vocabulary` a running log-sum-exp over blocks of the vocabulary with
recomputation, both written out here in plain torch. `liger's way` and `torchtitan's way` send each chunk's loss back at
once, to the weight and to the hidden states, which are cut off from what made them: the one keeps their gradient until
backward asks (as LigerFusedLinearPPOBase does), the other goes on from it (as ChunkedCELoss does).

All but `vocabulary` run on a GPU as well, in half precision too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from policy_head_problem import Problem
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nemo_flashrl.ops import fused_linear_gated_policy_loss, fused_linear_policy_loss

GIB = 2**30


def floor(problem: Problem) -> Callable[[], None]:
    hidden, weight = problem.hidden.detach(), problem.weight.detach()
    logits = hidden.new_empty(hidden.shape[0], weight.shape[0])
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def run() -> None:
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits, weight, out=grad_hidden)
        torch.mm(logits.t(), hidden, out=grad_weight)

    return run


def product(problem: Problem) -> Callable[[], None]:
    """The log-prob product alone, as the floor has it."""
    hidden, weight = problem.hidden.detach(), problem.weight.detach()
    logits = hidden.new_empty(hidden.shape[0], weight.shape[0])
    return lambda: torch.mm(hidden, weight.t(), out=logits)


def chunked_floor(problem: Problem) -> Callable[[], None]:
    """The same three products a chunk at a time: what a chunked method could reach at best."""
    hidden, weight = problem.hidden.detach(), problem.weight.detach()
    logits = hidden.new_empty(problem.chunk, weight.shape[0])
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)

    def run() -> None:
        for start in range(0, hidden.shape[0], problem.chunk):
            rows = hidden[start : start + problem.chunk]
            part = logits[: rows.shape[0]]
            torch.mm(rows, weight.t(), out=part)
            torch.mm(part, weight, out=grad_hidden[start : start + problem.chunk])
            grad_weight.addmm_(part.t(), rows)

    return run


def _main_grad(problem: Problem) -> Tensor:
    """Where the weight's gradient is added to what is there already, as under Megatron."""
    return torch.zeros_like(problem.weight, dtype=torch.float32)


def single_pass(problem: Problem, into_main_grad: bool = False, **settings: Any) -> Callable[[], None]:
    main_grad = _main_grad(problem) if into_main_grad else None

    def run() -> None:
        loss, _ = fused_linear_policy_loss(
            problem.hidden,
            problem.weight,
            problem.targets,
            problem.loss,
            chunk_tokens=problem.chunk,
            grad_weight=main_grad,
            **settings,
        )
        loss.backward()

    return run


def gated(problem: Problem, live: float, into_main_grad: bool = False, **settings: Any) -> Callable[[], None]:
    keep = problem.live(live)
    main_grad = _main_grad(problem) if into_main_grad else None

    def loss(logprobs: Tensor, keep: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        value, derivative = problem.loss(logprobs, tokens)
        return torch.where(keep[tokens], value, 0), torch.where(keep[tokens], derivative, 0)

    def run() -> None:
        total, _ = fused_linear_gated_policy_loss(
            problem.hidden,
            problem.weight,
            problem.targets,
            lambda logprobs, entropies: keep,
            loss,
            chunk_tokens=problem.chunk,
            grad_weight=main_grad,
            **settings,
        )
        total.backward()

    return run


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """At least in fp32."""
    logits = hidden @ weight.t()
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def naive(problem: Problem) -> Callable[[], None]:
    def run() -> None:
        logprobs = torch.log_softmax(_logits(problem.hidden, problem.weight), -1)
        problem.plain_loss(logprobs.gather(1, problem.targets[:, None]).squeeze(1)).backward()

    return run


def checkpointed(problem: Problem) -> Callable[[], None]:
    def part(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return torch.log_softmax(_logits(hidden, weight), -1).gather(1, targets[:, None]).squeeze(1)

    def run() -> None:
        parts = [
            checkpoint(part, hidden, problem.weight, targets, use_reentrant=False)
            for hidden, targets in zip(
                problem.hidden.split(problem.chunk), problem.targets.split(problem.chunk), strict=True
            )
        ]
        problem.plain_loss(torch.cat(parts)).backward()

    return run


def liger(problem: Problem) -> Callable[[], None]:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    rows = problem.targets.shape[0] // problem.chunk
    loss = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False, chunk_size=1)
    mask = torch.ones(rows, problem.chunk, device=problem.hidden.device)

    def run() -> None:
        total, _ = loss(
            problem.hidden.view(rows, problem.chunk, -1),
            problem.weight,
            problem.targets.view(rows, -1),
            mask,
            problem.advantages[:rows],
            old_per_token_logps=problem.behavior.view(rows, -1),
        )
        total.backward()

    return run


def _chunk_losses(problem: Problem) -> Iterator[tuple[slice, Tensor]]:
    """Each chunk's hidden states with their gradient; the weight's is added to its own."""
    for start in range(0, problem.targets.shape[0], problem.chunk):
        some = slice(start, start + problem.chunk)
        hidden = problem.hidden.detach()[some].requires_grad_()
        logprobs = -F.cross_entropy(_logits(hidden, problem.weight), problem.targets[some], reduction="none")
        ratio = torch.exp(logprobs.detach() - problem.behavior[some])
        (-(problem.advantages[some] * ratio * logprobs).sum()).backward()
        yield some, hidden.grad


def torchtitan_way(problem: Problem) -> Callable[[], None]:
    def run() -> None:
        gradient = torch.zeros_like(problem.hidden)
        for some, own in _chunk_losses(problem):
            gradient[some] = own
        problem.hidden.backward(gradient)

    return run


class _KeptGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, problem):
        gradients = torch.zeros_like(hidden), torch.zeros_like(weight)
        total = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, problem.targets.shape[0], problem.chunk):
            some = slice(start, start + problem.chunk)
            with torch.enable_grad():
                own = hidden.detach()[some].requires_grad_()
                held = weight.detach().requires_grad_()
                logprobs = torch.log_softmax(_logits(own, held), -1).gather(1, problem.targets[some, None]).squeeze(1)
                ratio = torch.exp(logprobs.detach() - problem.behavior[some])
                loss = -(problem.advantages[some] * ratio * logprobs).sum()
            gradients[0][some], of_weight = torch.autograd.grad(loss, (own, held))
            gradients[1].add_(of_weight)
            total += loss.detach()
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx, grad):
        hidden, weight = ctx.saved_tensors
        return hidden.mul_(grad), weight.mul_(grad), None


def liger_way(problem: Problem) -> Callable[[], None]:
    return lambda: _KeptGradients.apply(problem.hidden, problem.weight, problem).backward()


def trl(problem: Problem) -> Callable[[], None]:
    def run() -> None:
        logits = problem.hidden @ problem.weight.t()
        selected = logits.gather(-1, problem.targets[:, None]).squeeze(-1)
        log_sums = torch.stack([torch.logsumexp(part, -1) for part in logits.view(-1, problem.chunk, logits.shape[-1])])
        problem.plain_loss(selected - log_sums.view(-1)).backward()

    return run


class _VocabularyBlocks(torch.autograd.Function):
    """Log-probs with a running log-sum-exp over blocks of the vocabulary; backward recomputes each block."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, block):
        maximum = torch.full((hidden.shape[0],), float("-inf"))
        total, selected = torch.zeros_like(maximum), torch.zeros_like(maximum)
        for start in range(0, weight.shape[0], block):
            logits = hidden @ weight[start : start + block].t()
            larger = torch.maximum(maximum, logits.amax(-1))
            total = total * torch.exp(maximum - larger) + torch.exp(logits - larger[:, None]).sum(-1)
            maximum = larger
            inside = (targets >= start) & (targets < start + logits.shape[1])
            column = (targets - start).clamp(0, logits.shape[1] - 1)
            selected = torch.where(inside, logits.gather(1, column[:, None]).squeeze(1), selected)
        log_sum = maximum + total.log()
        ctx.save_for_backward(hidden, weight, targets, log_sum)
        ctx.block = block
        return selected - log_sum

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, targets, log_sum = ctx.saved_tensors
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for start in range(0, weight.shape[0], ctx.block):
            part = weight[start : start + ctx.block]
            gradient = torch.exp(hidden @ part.t() - log_sum[:, None]) * -grad[:, None]
            rows = ((targets >= start) & (targets < start + part.shape[0])).nonzero().squeeze(1)
            gradient[rows, targets[rows] - start] += grad[rows]
            grad_hidden += gradient @ part
            grad_weight[start : start + ctx.block] = gradient.t() @ hidden
        return grad_hidden, grad_weight, None, None


def vocabulary(problem: Problem) -> Callable[[], None]:
    block = max(
        1, problem.chunk * problem.weight.shape[0] // problem.hidden.shape[0]
    )  # as many logits as our chunk holds
    return lambda: problem.plain_loss(
        _VocabularyBlocks.apply(problem.hidden, problem.weight, problem.targets, block)
    ).backward()


METHODS: dict[str, Callable[[Problem], Callable[[], None]]] = {
    "floor": floor,
    "product": product,
    "chunked floor": chunked_floor,
    "ours": single_pass,
    "ours, into main_grad": lambda problem: single_pass(problem, into_main_grad=True),
    "gated, all live": lambda problem: gated(problem, 2.0),
    "gated, half live": lambda problem: gated(problem, 0.5),
    "gated, all live, one chunk held": lambda problem: gated(problem, 2.0, logits_budget_bytes=0),
    "gated, half live, one chunk held": lambda problem: gated(problem, 0.5, logits_budget_bytes=0),
    "gated, all live, logits held": lambda problem: gated(problem, 2.0, logits_budget_bytes=GIB),
    "naive": naive,
    "checkpoint": checkpointed,
    "liger": liger,
    "trl": trl,
    "vocabulary": vocabulary,
}
# What `make gpu-check` times, each with the weight's gradient where its method puts it.
ON_A_GPU: dict[str, Callable[[Problem], Callable[[], None]]] = {
    **{name: METHODS[name] for name in ("floor", "naive", "checkpoint", "liger")},
    "liger's way": liger_way,
    "torchtitan's way": torchtitan_way,
    "one pass": METHODS["ours, into main_grad"],
    "gated": lambda problem: gated(problem, 2.0, into_main_grad=True),
}
