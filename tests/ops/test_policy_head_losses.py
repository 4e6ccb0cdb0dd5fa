"""The fused output layer at work: losses, masks, the gate, microbatches in flight."""

from __future__ import annotations

import pytest
import torch
from accelerator import act_as_accelerator
from plain_policy_head import linear_logprob
from torch import Tensor

from nemo_flashrl.algorithms.algorithm import TokenBatch
from nemo_flashrl.algorithms.flash_reinforce import FlashReinforce, flash_reinforce_loss
from nemo_flashrl.ops import fused_linear_gated_policy_loss, fused_linear_logprob, fused_linear_policy_loss

T, H, V, CHUNK = 37, 16, 101, 10


def tensors(seed: int = 0, tokens: int = T, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, H, generator=generator, dtype=dtype).requires_grad_()
    weight = (0.3 * torch.randn(V, H, generator=generator, dtype=dtype)).requires_grad_()
    return hidden, weight, torch.randint(V, (tokens,), generator=generator)


@pytest.fixture(params=["cpu", "accelerator"])
def device(request, monkeypatch) -> None:
    """What the head does by the kind of device, on a CPU."""
    if request.param == "accelerator":
        act_as_accelerator(monkeypatch)


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def reinforce(logprobs, old, reference, advantages):
    ratio = torch.exp(logprobs.detach() - old)
    return -advantages * ratio * logprobs


def clipped(logprobs, old, reference, advantages):
    ratio = torch.exp(logprobs - old)
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def k1(logprobs, old, reference, advantages):
    return logprobs - reference


def k2(logprobs, old, reference, advantages):
    return (logprobs - reference) ** 2 / 2


def k3(logprobs, old, reference, advantages):
    return torch.exp(reference - logprobs) - (reference - logprobs) - 1


@pytest.mark.parametrize("formula", [reinforce, clipped, k1, k2, k3])
def test_every_token_loss_matches_autograd_in_float64(device, formula):
    hidden, weight, targets = tensors(1)
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    logprobs, _ = linear_logprob(*wide, targets, temperature=0.8)
    old, reference = ((logprobs.detach() + torch.randn(T, dtype=torch.float64)).float().double() for _ in range(2))
    advantages = torch.randn(T).double()
    right = formula(logprobs, old, reference, advantages).sum()
    right.backward()

    def loss(logprobs: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = logprobs.clone().requires_grad_()
            value = formula(leaf, old[tokens].float(), reference[tokens].float(), advantages[tokens].float())
            return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]

    total, _ = fused_linear_policy_loss(hidden, weight, targets, loss, temperature=0.8, chunk_tokens=CHUNK)
    (3 * total).backward()
    assert total.item() == pytest.approx(right.item(), rel=1e-5)
    assert relative(hidden.grad, 3 * wide[0].grad) <= 1e-6
    assert relative(weight.grad, 3 * wide[1].grad) <= 1e-6


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("with_mask", [False, True])
def test_what_lies_on_masked_rows_reaches_nothing(device, poison, with_mask):
    hidden, weight, targets = tensors(2)
    keep = torch.rand(T, generator=torch.Generator().manual_seed(5)) < 0.5
    keep[10:20] = False  # a whole chunk
    poisoned = torch.where(keep[:, None], hidden.detach(), poison).requires_grad_()
    mask = keep if with_mask else None
    targets = torch.where(keep, targets, -100) if with_mask else targets

    def loss(logprobs: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        return torch.where(keep[tokens], 2 * logprobs, 0), torch.where(keep[tokens], 2.0, 0.0)

    rows = keep.nonzero().squeeze(1)
    logprobs, _ = linear_logprob(hidden[rows], weight, targets[rows])
    (2 * logprobs).sum().backward()
    right = (hidden.grad, weight.grad.clone())

    def check(total: Tensor) -> None:
        weight.grad = poisoned.grad = None
        total.backward()
        assert total.item() == pytest.approx(2 * logprobs.sum().item(), rel=1e-6)
        assert not poisoned.grad[~keep].any()
        assert relative(poisoned.grad, right[0]) <= 1e-6
        assert relative(weight.grad, right[1]) <= 1e-6

    settings = {"chunk_tokens": CHUNK, "mask": mask}
    check(fused_linear_policy_loss(poisoned, weight, targets, loss, **settings)[0])
    fused = fused_linear_logprob(poisoned, weight, targets, **settings)
    assert not with_mask or not fused[~keep].any()
    check(torch.where(keep, 2 * fused, 0).sum())
    for budget in (0, 2**30):
        check(
            fused_linear_gated_policy_loss(
                poisoned,
                weight,
                targets,
                lambda logprobs, entropies: keep,
                lambda logprobs, keep, tokens: loss(logprobs, tokens),
                logits_budget_bytes=budget,
                **settings,
            )[0]
        )


def gate_batch(hidden, weight, targets, rows: int, generator: torch.Generator, noise: float):
    tokens = targets.numel()
    with torch.no_grad():
        current, _ = linear_logprob(hidden, weight, targets)
    behavior = (current + noise * torch.randn(tokens, generator=generator)).clamp(max=0)
    mask = torch.rand(tokens, generator=generator) < 0.8
    mask[:: tokens // rows] = True  # every trajectory has an action token
    row = torch.arange(rows).repeat_interleave(tokens // rows)
    return behavior, mask, row, torch.randn(rows, generator=generator)


def test_gate_decides_as_the_plain_loss_on_10000_batches():
    # 10,000 batches of 4 trajectories, 500 batches to a call: the gate looks at one trajectory at a time. Divergences
    # lie on both sides of the threshold; only one that meets it to the last digits may be decided by rounding.
    algorithm, rows, length = FlashReinforce(), 2000, 5
    generator = torch.Generator().manual_seed(11)
    decided = torch.zeros(2, dtype=torch.int64)
    for seed in range(20):
        hidden, weight, targets = tensors(seed, rows * length)
        behavior, mask, row, rewards = gate_batch(hidden, weight, targets, rows, generator, noise=1.2)
        behavior = behavior.clamp(min=-15)
        advantages, token_weights = algorithm.weigh(rewards, torch.bincount(row[mask]), torch.arange(rows))
        batch = TokenBatch(behavior, mask, row, advantages, token_weights, torch.zeros(rows, dtype=torch.bool))
        with torch.no_grad():
            fused = fused_linear_logprob(hidden, weight, targets, chunk_tokens=1024)
            plain, _ = linear_logprob(hidden, weight, targets)
        gate = algorithm.gate(fused, batch)
        shaped = [x.view(rows, length) for x in (plain, behavior)]
        _, stats = flash_reinforce_loss(*shaped, rewards, mask.view(rows, length))
        assert torch.equal(gate.keep, mask & stats["admitted"][row])
        assert torch.equal(gate.per_row["admitted"], stats["admitted"])
        decided += torch.bincount(stats["admitted"].long(), minlength=2)
    assert decided.sum() == 40_000 and decided.min() > 5_000


@pytest.mark.parametrize("budget", [0, 2**30])
@pytest.mark.parametrize("given", [False, True])
def test_flash_reinforce_through_the_head_is_the_plain_loss(device, budget, given):
    algorithm, rows = FlashReinforce(), 4
    hidden, weight, targets = tensors(4, 40)
    generator = torch.Generator().manual_seed(3)
    behavior, mask, row, rewards = gate_batch(hidden, weight, targets, rows, generator, noise=0.1)
    behavior[row == 2] = -0.2  # the sampler was nearly sure, the policy is not: rejected
    logprobs, _ = linear_logprob(hidden, weight, targets)
    plain, stats = flash_reinforce_loss(logprobs.view(rows, -1), behavior.view(rows, -1), rewards, mask.view(rows, -1))
    plain.backward()
    right = (hidden.grad, weight.grad)
    hidden.grad = weight.grad = None
    assert stats["admitted"].tolist() == [True, True, False, True]

    advantages, token_weights = algorithm.weigh(rewards, torch.bincount(row[mask]), torch.arange(rows))
    batch = TokenBatch(behavior, mask, row, advantages, token_weights, torch.zeros(rows, dtype=torch.bool))
    total, _ = fused_linear_gated_policy_loss(
        hidden,
        weight,
        targets,
        lambda logprobs, entropies: algorithm.gate(logprobs, batch).keep,
        lambda logprobs, keep, tokens: algorithm.token_loss(logprobs, batch, keep, tokens),
        mask=mask,
        chunk_tokens=8,
        logits_budget_bytes=budget,
        logprobs=fused_linear_logprob(hidden, weight, targets).detach() if given else None,
    )
    total.backward()
    assert total.item() == pytest.approx(plain.item(), rel=1e-5)
    assert relative(hidden.grad, right[0]) <= 1e-6
    assert relative(weight.grad, right[1]) <= 1e-6


def constant_loss(coefficient: float):
    return lambda logprobs, tokens: (coefficient * logprobs, torch.full_like(logprobs, coefficient))


@pytest.mark.parametrize("direct", [False, True])
def test_two_forwards_before_two_backwards(device, direct):
    # 1F1B: microbatch 2 runs forward before microbatch 1 runs backward.
    parts = [tensors(6), tensors(7)]
    weight = parts[0][1]
    main_grad = torch.ones_like(weight)
    settings = {"grad_weight": main_grad, "loss_scale": 4.0} if direct else {}
    losses = [
        fused_linear_policy_loss(hidden, weight, targets, constant_loss(c), chunk_tokens=CHUNK, **settings)[0]
        for (hidden, _, targets), c in zip(parts, (1.5, -0.5), strict=True)
    ]
    for loss in losses:
        (4 * loss).backward()
    wide = [hidden.detach().double().requires_grad_() for hidden, _, _ in parts]
    wide_weight = weight.detach().double().requires_grad_()
    for hidden, (_, _, targets), c in zip(wide, parts, (6.0, -2.0), strict=True):
        (c * linear_logprob(hidden, wide_weight, targets)[0]).sum().backward()
    for (hidden, _, _), right in zip(parts, wide, strict=True):
        assert relative(hidden.grad, right.grad) <= 1e-6
    assert direct == (weight.grad is None)
    assert relative(main_grad - 1 if direct else weight.grad, wide_weight.grad) <= 1e-6


def test_grad_weight_takes_the_logprob_gradient_and_hands_on_a_placeholder():
    hidden, weight, targets = tensors(8, dtype=torch.bfloat16)
    main_grad, placeholder = torch.zeros(V, H), torch.zeros(V, H, dtype=torch.bfloat16)
    logprobs = fused_linear_logprob(hidden, weight, targets, grad_weight=main_grad, on_grad_weight=lambda: placeholder)
    (2 * logprobs).sum().backward()
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    (2 * linear_logprob(*wide, targets)[0]).sum().backward()
    assert relative(main_grad, wide[1].grad) <= 1e-6  # fp32 sums, though the weight is bf16
    assert torch.equal(weight.grad, placeholder)


def test_backward_is_refused_where_the_gradient_would_be_wrong():
    hidden, weight, targets = tensors(9)
    loss, _ = fused_linear_policy_loss(
        hidden, weight, targets, constant_loss(1.0), grad_weight=torch.zeros(V, H), loss_scale=2.0
    )
    with pytest.raises(RuntimeError, match="loss_scale=2.0"):
        loss.backward()
    loss, _ = fused_linear_policy_loss(hidden, weight, targets, constant_loss(1.0))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        loss.backward()


def test_a_scale_that_n_microbatches_have_rounded_is_the_same_scale():
    """Multiplied by n and divided by n again in fp32, as a trainer does: 1 comes back off by one bit for some n."""
    hidden, weight, targets = tensors(9)
    rounded = set()
    for n in range(1, 201):
        main_grad = torch.zeros(V, H)
        loss, _ = fused_linear_policy_loss(hidden, weight, targets, constant_loss(1.0), grad_weight=main_grad)
        (loss * n / n).backward()
        rounded |= {n} if (torch.ones(()) / n * n) != 1 else set()
    assert 41 in rounded
    loss, _ = fused_linear_policy_loss(hidden, weight, targets, constant_loss(1.0), grad_weight=main_grad)
    with pytest.raises(RuntimeError, match="loss_scale=1.0"):
        (loss * 1.00001).backward()


def test_nothing_is_differentiated_that_need_not_be():
    hidden, weight, targets = tensors(10)
    frozen = weight.detach()
    fused_linear_policy_loss(hidden, frozen, targets, constant_loss(1.0))[0].backward()
    assert hidden.grad.any()
    with torch.no_grad():
        loss, logprobs = fused_linear_policy_loss(hidden, weight, targets, constant_loss(1.0))
    assert not loss.requires_grad and not logprobs.requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(fused_linear_policy_loss(hidden, weight, targets, constant_loss(1.0))[1], logprobs)
