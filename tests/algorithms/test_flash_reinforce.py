"""FlashREINFORCE: numbers derived by hand, a plain per-row reference, and the faults that must be impossible."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from nemo_flashrl.algorithms import flash_reinforce_loss
from nemo_flashrl.algorithms.algorithm import TokenBatch
from nemo_flashrl.algorithms.flash_reinforce import FlashReinforce, FlashReinforceSettings
from nemo_flashrl.algorithms.unfused_loss import policy_loss

NAN, INF = math.nan, math.inf


def log(rows):
    return torch.tensor([[math.log(value) for value in row] for row in rows], dtype=torch.float64)


def random_batch(seed, count, length, noise=0.3, dtype=torch.float64):
    """[B, T] log-probs of two policies `noise` apart, rewards [B], a mask with at least one action token a row."""
    generator = torch.Generator().manual_seed(seed)
    behavior = -3 * torch.rand(count, length, generator=generator, dtype=torch.float64) - 0.01
    scale = noise * torch.rand(count, 1, generator=generator, dtype=torch.float64)
    current = (behavior + scale * torch.randn(count, length, generator=generator, dtype=torch.float64)).clamp(max=-1e-3)
    mask = torch.rand(count, length, generator=generator) < 0.6
    mask[torch.arange(count), torch.randint(length, (count,), generator=generator)] = True
    rewards = torch.randn(count, generator=generator, dtype=torch.float64)
    return current.to(dtype).requires_grad_(), behavior.to(dtype), rewards.to(dtype), mask


def reference(logprobs, behavior, rewards, mask, delta, guard=20.0, keep=None):
    """The paper's formula a row and a token at a time, in Python floats: (loss, gradient, divergences, admitted)."""
    count, length = logprobs.shape
    mean = sum(rewards.tolist()) / count
    loss, gradient, divergences, admitted = 0.0, torch.zeros(count, length, dtype=torch.float64), [], []
    for i in range(count):
        tokens = [t for t in range(length) if mask[i, t]]
        divergence, advantage = 0.0, rewards[i].item() - mean
        for t in tokens:
            p = min(max(math.exp(behavior[i, t].item()), 1e-6), 1 - 1e-6)
            q = min(max(math.exp(logprobs[i, t].item()), 1e-6), 1 - 1e-6)
            divergence += (p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))) / len(tokens)
        divergences.append(max(0.0, divergence))
        fits = all(abs(logprobs[i, t].item() - behavior[i, t].item()) <= guard for t in tokens)
        admitted.append(divergences[-1] <= delta and fits)
        for t in tokens:
            if admitted[-1] and (keep is None or keep[i, t]):
                ratio = math.exp(logprobs[i, t].item() - behavior[i, t].item())
                gradient[i, t] = -advantage * ratio / (count * len(tokens))
                loss += gradient[i, t].item() * logprobs[i, t].item()
    return loss, gradient, divergences, admitted


def flat(logprobs, behavior, rewards, mask, algorithm, **fields):
    """The rectangle as the trainer's flat batch."""
    advantages, weights = algorithm.weigh(rewards, mask.sum(1), torch.zeros(len(rewards), dtype=torch.int64))
    row = torch.arange(len(rewards)).repeat_interleave(mask.shape[1])
    failures = fields.pop("failures", torch.zeros(len(rewards), dtype=torch.bool))
    fields = {name: value.flatten() for name, value in fields.items()}
    return logprobs.flatten(), TokenBatch(
        behavior.flatten(), mask.flatten(), row, advantages, weights, failures, **fields
    )


def test_by_hand():
    # Row 0: sampled with 1/2, 1/4, now 3/4, 1/8: ratios 3/2, 1/2. Row 1: 1/5 both. Rewards 1, 0: advantages 1/2, -1/2.
    # d L / d logp = -(1/B)(A_i / T_i) rho: -(1/2)(1/4)(3/2) = -3/16, -(1/2)(1/4)(1/2) = -1/16, (1/2)(1/2) = 1/4.
    # D_0 = mean of 1/2 ln(2/3) + 1/2 ln 2 = 1/2 ln(4/3) and 1/4 ln 2 + 3/4 ln(6/7); D_1 = 0.
    logprobs = log([[3 / 4, 1 / 8], [1 / 5, 1]]).requires_grad_()
    behavior = log([[1 / 2, 1 / 4], [1 / 5, 1]])
    mask, rewards = torch.tensor([[True, True], [True, False]]), torch.tensor([1.0, 0.0])
    divergence = (math.log(4 / 3) / 2 + math.log(2) / 4 + 3 * math.log(6 / 7) / 4) / 2

    loss, stats = flash_reinforce_loss(logprobs, behavior, rewards, mask, delta=INF)
    loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-3 / 16, -1 / 16], [1 / 4, 0]], dtype=torch.float64))
    assert loss.item() == pytest.approx(
        -3 / 16 * math.log(3 / 4) - 1 / 16 * math.log(1 / 8) + math.log(1 / 5) / 4, abs=1e-12
    )
    assert stats["advantages"].tolist() == [0.5, -0.5]
    assert stats["sequence_kl"].tolist() == pytest.approx([divergence, 0], abs=1e-12)
    assert stats["admitted"].tolist() == [True, True]
    # (3/2 + 1/2 + 1) / 3 = 1
    assert [stats[name].item() for name in ("policy_tokens", "retained_tokens", "ratio_mean", "ratio_max")] == [
        3, 3, pytest.approx(1), pytest.approx(1.5),
    ]  # fmt: skip

    # At the default delta row 0 is rejected, and stays in B: row 1 keeps its 1/4; dividing by the admitted gives 1/2.
    logprobs.grad = None
    loss, stats = flash_reinforce_loss(logprobs, behavior, rewards, mask)
    loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0, 0], [1 / 4, 0]], dtype=torch.float64))
    assert stats["admitted"].tolist() == [False, True]
    assert (stats["acceptance_rate"].item(), stats["retained_tokens"].item()) == (0.5, 1)


@pytest.mark.parametrize(("seed", "count", "length"), [(0, 1, 1), (1, 2, 7), (2, 16, 5), (3, 5, 64), (4, 33, 12)])
def test_equals_the_reference(seed, count, length):
    logprobs, behavior, rewards, mask = random_batch(seed, count, length)
    for delta in (INF, 3e-3, 0.0):
        expected, gradient, divergences, admitted = reference(logprobs, behavior, rewards, mask, delta)
        loss, stats = flash_reinforce_loss(logprobs, behavior, rewards, mask, delta=delta)
        (actual,) = torch.autograd.grad(loss, logprobs)
        torch.testing.assert_close(actual, gradient, rtol=1e-12, atol=1e-15)
        assert loss.item() == pytest.approx(expected, rel=1e-11, abs=1e-14)
        assert stats["sequence_kl"].tolist() == pytest.approx(divergences, rel=1e-12, abs=1e-15)
        assert stats["admitted"].tolist() == admitted
        assert stats["acceptance_rate"].item() == pytest.approx(sum(admitted) / count)
        kept = [int(mask[i].sum()) for i in range(count) if admitted[i]]
        assert stats["retained_tokens"].item() == sum(kept)


def test_float32_and_bf16_are_computed_in_float32():
    logprobs, behavior, rewards, mask = random_batch(5, 12, 40, dtype=torch.float32)
    expected, gradient, divergences, _ = reference(logprobs, behavior, rewards, mask, INF)
    loss, stats = flash_reinforce_loss(logprobs, behavior, rewards, mask, delta=INF)
    (actual,) = torch.autograd.grad(loss, logprobs)
    assert loss.dtype == stats["advantages"].dtype == stats["sequence_kl"].dtype == torch.float32
    torch.testing.assert_close(actual.double(), gradient, rtol=2e-6, atol=1e-9)
    assert loss.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert stats["sequence_kl"].tolist() == pytest.approx(divergences, rel=1e-6, abs=1e-9)

    coarse = logprobs.detach().bfloat16().requires_grad_()
    loss, _ = flash_reinforce_loss(coarse, behavior.bfloat16(), rewards.bfloat16(), mask, delta=INF)
    again, _ = flash_reinforce_loss(
        coarse.float(), behavior.bfloat16().float(), rewards.bfloat16().float(), mask, delta=INF
    )
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == again.item()
    assert coarse.grad.dtype == torch.bfloat16


def test_derivative_leaves_the_ratio_alone():
    logprobs, behavior, rewards, mask = random_batch(6, 4, 6, noise=0.2)
    loss, _ = flash_reinforce_loss(logprobs, behavior, rewards, mask, delta=INF)
    (actual,) = torch.autograd.grad(loss, logprobs)
    weights = mask / (len(rewards) * mask.sum(1, keepdim=True)) * (rewards - rewards.mean())[:, None]
    ratio = (logprobs - behavior).exp()
    (right,) = torch.autograd.grad(-(weights * ratio.detach() * logprobs).sum(), logprobs, retain_graph=True)
    (wrong,) = torch.autograd.grad(-(weights * ratio * logprobs).sum(), logprobs)  # through the ratio: rho (1 + logp)
    torch.testing.assert_close(actual, right, rtol=1e-12, atol=0)
    assert (actual - wrong).abs().max() > 0.05
    # With ratio 1 the value is linear in logp, and its finite differences are the derivative.
    algorithm = FlashReinforce(FlashReinforceSettings(importance_sampling=False, delta=INF))
    values, batch = flat(logprobs.detach(), behavior, rewards, mask, algorithm)
    assert torch.autograd.gradcheck(lambda x: policy_loss(algorithm, x, batch)[0], values.requires_grad_())
    (plain,) = torch.autograd.grad(3 * policy_loss(algorithm, values, batch)[0], values)
    torch.testing.assert_close(plain.view(4, 6), -3 * weights, rtol=1e-12, atol=0)


def test_split_into_microbatches_changes_nothing():
    algorithm = FlashReinforce(FlashReinforceSettings(delta=0.01, negative_token_fraction=0.5))
    logprobs, behavior, rewards, mask = random_batch(7, 12, 9)
    entropies, failures = torch.rand(12, 9, dtype=torch.float64), rewards < 0.3
    values, batch = flat(logprobs, behavior, rewards, mask, algorithm, entropies=entropies, failures=failures)
    loss, stats = policy_loss(algorithm, values, batch)
    (gradient,) = torch.autograd.grad(loss, logprobs, retain_graph=True)
    assert 0 < stats["admitted"] < 12
    total, sums, wrong = 0, {}, 0
    for rows in ([3], [0, 7, 1, 11, 2], [4, 5, 6, 8, 9, 10]):
        # One padding row at the end, filled with rubbish: token weight 0, no action token.
        part = TokenBatch(
            behavior_logprobs=torch.cat([behavior[rows].flatten(), torch.full((4,), NAN, dtype=torch.float64)]),
            action_mask=torch.cat([mask[rows].flatten(), torch.zeros(4, dtype=torch.bool)]),
            row=torch.arange(len(rows) + 1).repeat_interleave(9)[: 9 * len(rows) + 4],
            advantages=torch.cat([batch.advantages[rows], torch.tensor([NAN])]),
            token_weights=torch.cat([batch.token_weights[rows], torch.zeros(1)]),
            failures=torch.cat([failures[rows], torch.ones(1, dtype=torch.bool)]),
            entropies=torch.cat([entropies[rows].flatten(), torch.full((4,), INF, dtype=torch.float64)]),
        )
        share, counts = policy_loss(algorithm, torch.cat([logprobs[rows].flatten(), torch.full((4,), NAN)]), part)
        total = total + share
        wrong += share.item() * 12 / len(rows) / 3  # the mean over microbatches of means over their rows
        for name, value in counts.items():
            maximum = name.endswith("_max")
            sums[name] = max(sums.get(name, 0), value.item()) if maximum else sums.get(name, 0) + value.item()
    torch.testing.assert_close(torch.autograd.grad(total, logprobs)[0], gradient, rtol=1e-13, atol=0)
    assert total.item() == pytest.approx(loss.item(), rel=1e-12)
    assert wrong != pytest.approx(loss.item(), rel=0.05)
    assert sums == pytest.approx({name: value.item() for name, value in stats.items()}, rel=1e-5)


def test_token_loss_on_slices_equals_whole():
    algorithm = FlashReinforce(FlashReinforceSettings(delta=INF))
    values, batch = flat(*random_batch(8, 6, 10, dtype=torch.float32), algorithm)
    keep = algorithm.gate(values.detach(), batch).keep
    whole = algorithm.token_loss(values.detach(), batch, keep, slice(0, 60))
    slices = [slice(start, min(start + 7, 60)) for start in range(0, 60, 7)]
    parts = [algorithm.token_loss(values.detach()[part], batch, keep, part) for part in slices]
    for index in range(2):
        assert torch.equal(whole[index], torch.cat([part[index] for part in parts]))
    assert whole[0].dtype == torch.float32


@pytest.mark.parametrize("rubbish", [NAN, INF, -INF, 1000.0, -1000.0])
def test_masked_positions_change_nothing(rubbish):
    clean = random_batch(9, 5, 8)
    logprobs, behavior, rewards, mask = random_batch(9, 5, 8)
    with torch.no_grad():
        logprobs[~mask], behavior[~mask] = rubbish, -rubbish
    expected, expected_stats = flash_reinforce_loss(*clean)
    loss, stats = flash_reinforce_loss(logprobs, behavior, rewards, mask)
    loss.backward()
    assert loss.item() == expected.item()
    assert (logprobs.grad[~mask] == 0).all()
    for name, value in expected_stats.items():
        assert torch.equal(stats[name], value), name


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e-30, -7.7, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 3, 7, 10, 49])
def test_equal_rewards_give_exactly_zero(reward, dtype, count):
    # 0.1 summed seven times and divided by 7 is not 0.1 in either precision.
    logprobs, behavior, _, mask = random_batch(10, count, 6, dtype=dtype)
    loss, stats = flash_reinforce_loss(logprobs, behavior, torch.full((count,), reward, dtype=dtype), mask, delta=INF)
    loss.backward()
    assert (stats["advantages"] == 0).all()
    assert (logprobs.grad == 0).all()
    assert loss.item() == 0


def test_all_rejected_gives_exactly_zero():
    logprobs, behavior, rewards, mask = random_batch(11, 6, 20)
    loss, stats = flash_reinforce_loss(logprobs, (behavior - 2).detach(), rewards, mask)
    loss.backward()
    assert stats["acceptance_rate"].item() == stats["retained_tokens"].item() == stats["ratio_mean"].item() == 0
    assert loss.item() == 0
    assert (logprobs.grad == 0).all()


def test_gate_admits_up_to_delta_itself():
    logprobs, behavior, rewards, mask = random_batch(13, 8, 6, dtype=torch.float32)
    divergences = flash_reinforce_loss(logprobs, behavior, rewards, mask)[1]["sequence_kl"]
    delta = divergences.sort().values[4].item()
    _, stats = flash_reinforce_loss(logprobs, behavior, rewards, mask, delta=delta)
    assert stats["admitted"].sum() == 5
    _, stats = flash_reinforce_loss(logprobs, behavior, rewards, mask, delta=delta * (1 - 1e-6))
    assert stats["admitted"].sum() == 4


@pytest.mark.parametrize("seed", range(4))
def test_filter_equals_the_reference(seed):
    logprobs, behavior, rewards, mask = random_batch(20 + seed, 9, 15)
    entropies = torch.randint(4, (9, 15)).double()  # many ties
    failures, fraction = torch.rand(9) < 0.6, 0.3
    keep = torch.zeros_like(mask)
    for i in range(9):
        tokens = [t for t in range(15) if mask[i, t]]
        ranked = sorted(tokens, key=lambda t: (-entropies[i, t].item(), t))
        keep[i, ranked[: math.ceil(Fraction(3, 10) * len(tokens))] if failures[i] else tokens] = True
    _, gradient, _, _ = reference(logprobs, behavior, rewards, mask, INF, keep=keep)
    options = {"negative_token_fraction": fraction, "entropies": entropies, "failures": failures}
    loss, stats = flash_reinforce_loss(logprobs, behavior, rewards, mask, delta=INF, **options)
    torch.testing.assert_close(torch.autograd.grad(loss, logprobs)[0], gradient, rtol=1e-12, atol=1e-15)
    assert stats["retained_tokens"].item() == keep.sum()
