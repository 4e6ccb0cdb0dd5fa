"""GRPO: numbers derived by hand, autograd of the plain formula, and the faults that must be impossible."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from nemo_flashrl.algorithms import group_advantages, grpo_loss
from nemo_flashrl.algorithms.algorithm import TokenBatch
from nemo_flashrl.algorithms.grpo import Grpo, GrpoSettings
from nemo_flashrl.algorithms.kl import WithKl
from nemo_flashrl.algorithms.unfused_loss import policy_loss

NAN, INF = math.nan, math.inf


def random_batch(seed, count, length, dtype=torch.float64):
    """[B, T] log-probs of current, sampling and reference policy, rewards [B], mask, groups of two or three."""
    generator = torch.Generator().manual_seed(seed)
    behavior = -3 * torch.rand(count, length, generator=generator, dtype=torch.float64) - 0.01
    noise = 0.3 * torch.randn(2, count, length, generator=generator, dtype=torch.float64)
    current, reference = (behavior + noise).clamp(max=-1e-3)
    mask = torch.rand(count, length, generator=generator) < 0.6
    mask[torch.arange(count), torch.randint(length, (count,), generator=generator)] = True
    groups = (torch.arange(count) // 2).clamp(max=count // 2 - 1)[torch.randperm(count, generator=generator)] * 7 - 3
    rewards = torch.randn(count, generator=generator, dtype=torch.float64)
    return current.to(dtype).requires_grad_(), behavior.to(dtype), reference.to(dtype), rewards.to(dtype), mask, groups


def flat(algorithm, logprobs, behavior, rewards, mask, groups, reference=None, kl_coefficient=0.0):
    """The rectangle as the trainer's flat batch."""
    advantages, weights = algorithm.weigh(rewards, mask.sum(1), groups)
    row = torch.arange(len(rewards)).repeat_interleave(mask.shape[1])
    failures = torch.zeros(len(rewards), dtype=torch.bool)
    reference = None if reference is None else reference.flatten()
    batch = TokenBatch(
        behavior.flatten(), mask.flatten(), row, advantages, weights, failures, reference, kl_coefficient
    )
    return logprobs.flatten(), batch


def plain_loss(logprobs, behavior, reference, rewards, mask, groups, coefficient, aggregation):
    """The formula with min and clamp on the whole rectangle, for autograd."""
    advantages = torch.zeros_like(rewards)
    for group in set(groups.tolist()):
        own = rewards[groups == group].tolist()
        mean, std = statistics.mean(own), statistics.stdev(own)
        advantages[groups == group] = (rewards[groups == group] - mean) / (std + 1e-6)
    ratio = (logprobs - behavior).exp()
    surrogate = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.28) * advantages[:, None])
    divergence = (reference - logprobs).exp() - (reference - logprobs) - 1
    per_token = (coefficient * divergence - surrogate) * mask
    if aggregation == "sample_mean":
        return (per_token.sum(1) / mask.sum(1)).mean()
    return per_token.sum() / (mask.sum() if aggregation == "token_mean" else len(rewards))


def test_advantages_by_hand():
    # 1, 0, 0, 0: mean 1/4, unbiased variance (9/16 + 3/16) / 3 = 1/4, std 1/2. Biased, the first would be sqrt(3).
    # 3, 1: mean 2, std sqrt(2), advantages 1 / sqrt(2). Groups are interleaved and numbered anyhow.
    rewards = torch.tensor([1.0, 3.0, 0.0, 0.0, 1.0, 0.0])
    groups = torch.tensor([9, -4, 9, 9, -4, 9])
    half = math.sqrt(0.5)
    right = torch.tensor([1.5, half, -0.5, -0.5, -half, -0.5])
    torch.testing.assert_close(group_advantages(rewards, groups, epsilon=0.0), right)
    # epsilon is added to the standard deviation: (3/4) / (1/2 + 1/4) = 1.
    assert group_advantages(rewards, groups, epsilon=0.25)[0].item() == 1
    # A mean over the batch instead of the group is another number.
    assert group_advantages(rewards, torch.zeros(6, dtype=torch.int64), epsilon=0.0)[0] != pytest.approx(1.5, abs=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.7, 1e30])
def test_equal_rewards_in_a_group_give_exactly_zero(reward, dtype):
    # 0.1 seven times has mean 0.09999999999999999 and std 1e-17: with epsilon 0 the advantages would be of order 1.
    rewards = torch.full((9,), reward, dtype=dtype)
    rewards[7:] = torch.tensor([0.0, 1.0])
    groups = torch.tensor([0] * 7 + [1] * 2)
    advantages = group_advantages(rewards, groups, epsilon=0.0)
    assert advantages.dtype == dtype
    assert (advantages[:7] == 0).all()
    assert advantages[7:].tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])
    logprobs, behavior, _, _, mask, _ = random_batch(0, 9, 5, dtype)
    loss, _ = grpo_loss(logprobs, behavior, rewards, mask, groups, advantage_epsilon=0.0)
    loss.backward()
    assert (logprobs.grad[:7] == 0).all()
    assert (logprobs.grad[7:] != 0).any()


@pytest.mark.parametrize(
    ("aggregation", "first", "second"),
    [("sample_mean", 1 / 6, 1 / 4), ("token_mean", 1 / 5, 1 / 5), ("sequence_sum", 1 / 2, 1 / 2)],
)
def test_loss_by_hand(aggregation, first, second):
    # One group, rewards 1, 0: advantages +-a, a = sqrt(1/2). B = 2, T = 3 and 2, clip to [0.8, 1.2].
    # Row 0, A = a: ratio 3/2 is clipped: -1.2 a, slope 0; 1/2 is not: -0.5 a, slope -0.5 a; 1: -a, slope -a.
    # Row 1, A = -a: ratio 1/2 is clipped: 0.8 a, slope 0; 3/2 is not: 1.5 a, slope 1.5 a.
    a = math.sqrt(0.5)
    ratios = torch.tensor([[1.5, 0.5, 1.0], [0.5, 1.5, 1.0]], dtype=torch.float64)
    behavior = torch.full((2, 3), -2.0, dtype=torch.float64)
    logprobs = (behavior + ratios.log()).requires_grad_()
    mask = torch.tensor([[True, True, True], [True, True, False]])
    groups = torch.tensor([5, 5])
    loss, stats = grpo_loss(
        logprobs,
        behavior,
        torch.tensor([1.0, 0.0]),
        mask,
        groups,
        aggregation=aggregation,
        advantage_epsilon=0.0,
    )
    loss.backward()
    assert loss.item() == pytest.approx(first * -2.7 * a + second * 2.3 * a, rel=1e-12)
    right = torch.tensor([[0, -0.5 * a * first, -a * first], [0, 1.5 * a * second, 0]], dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad, right, rtol=1e-12, atol=0)
    assert stats["advantages"].tolist() == pytest.approx([a, -a])
    # Ratios 1.5, 0.5, 1, 0.5, 1.5 on five tokens, two of them clipped.
    shown = [stats[name].item() for name in ("policy_tokens", "clipped_fraction", "ratio_mean", "ratio_max")]
    assert shown == pytest.approx([5, 0.4, 1, 1.5])


def test_the_two_clips_are_apart():
    """Ratios 3/2 and 1/2 for A = a and for A = -a, a = sqrt(1/2); each clip binds where the other is wide.

    Up to 1.4: -1.4 a, not -1.5 a; down to 0.3: 0.5 a. Up to 1.6: -1.5 a; down to 0.8: 0.8 a, not 0.5 a.
    """
    a = math.sqrt(0.5)
    behavior = torch.full((2, 2), -2.0, dtype=torch.float64)
    logprobs = behavior + torch.tensor([[1.5, 0.5], [1.5, 0.5]], dtype=torch.float64).log()
    rest = (behavior, torch.tensor([1.0, 0.0]), torch.ones(2, 2, dtype=torch.bool), torch.tensor([5, 5]))
    for low, high, right in ((0.7, 0.4, -1.4 - 0.5 + 1.5 + 0.5), (0.2, 0.6, -1.5 - 0.5 + 1.5 + 0.8)):
        loss, stats = grpo_loss(logprobs, *rest, clip_low=low, clip_high=high, advantage_epsilon=0.0)
        assert loss.item() == pytest.approx(right * a / 4, rel=1e-12)
        assert stats["clipped_fraction"].item() == 1 / 4


def test_k3_by_hand():
    # logref - logp = ln 2: k3 = 2 - ln 2 - 1, slope -(2 - 1); ln(1/2): 1/2 + ln 2 - 1, slope 1/2. Weight 1/2 each.
    logprobs = torch.tensor([[-1.0], [-1.0]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[-1 + math.log(2)], [-1 - math.log(2)]], dtype=torch.float64)
    loss, stats = grpo_loss(
        logprobs,
        logprobs.detach(),
        torch.tensor([0.0, 0.0]),
        torch.ones(2, 1, dtype=torch.bool),
        torch.tensor([0, 0]),
        reference_logprobs=reference,
        kl_coefficient=0.1,
    )
    loss.backward()
    assert loss.item() == pytest.approx(0.1 * 0.5 / 2, rel=1e-12)
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-0.05], [0.025]], dtype=torch.float64))
    assert stats["kl_mean"].item() == pytest.approx(0.25)


@pytest.mark.parametrize("aggregation", ["sample_mean", "token_mean", "sequence_sum"])
@pytest.mark.parametrize(("seed", "count", "length"), [(1, 2, 1), (2, 6, 9), (3, 15, 4)])
def test_equals_autograd_of_the_formula(aggregation, seed, count, length):
    logprobs, behavior, reference, rewards, mask, groups = random_batch(seed, count, length)
    right = plain_loss(logprobs, behavior, reference, rewards, mask, groups, 0.05, aggregation)
    (gradient,) = torch.autograd.grad(right, logprobs)
    options = {"kl_coefficient": 0.05, "clip_high": 0.28, "aggregation": aggregation}
    loss, _ = grpo_loss(logprobs, behavior, rewards, mask, groups, reference_logprobs=reference, **options)
    torch.testing.assert_close(torch.autograd.grad(loss, logprobs)[0], gradient, rtol=1e-11, atol=1e-15)
    assert loss.item() == pytest.approx(right.item(), rel=1e-11)


def test_returned_derivative_is_that_of_the_value():
    logprobs, behavior, reference, rewards, mask, groups = random_batch(4, 8, 5)
    algorithm = WithKl(Grpo())
    values, batch = flat(algorithm, logprobs.detach(), behavior, rewards, mask, groups, reference, 0.3)
    assert torch.autograd.gradcheck(lambda x: policy_loss(algorithm, x, batch)[0], values.requires_grad_())


def test_split_into_microbatches_changes_nothing():
    logprobs, behavior, reference, rewards, mask, groups = random_batch(5, 12, 7, torch.float32)
    algorithm = WithKl(Grpo(GrpoSettings(aggregation="token_mean")))
    values, batch = flat(algorithm, logprobs, behavior, rewards, mask, groups, reference, 0.1)
    loss, stats = policy_loss(algorithm, values, batch)
    (gradient,) = torch.autograd.grad(loss, logprobs, retain_graph=True)
    total, sums, wrong = 0, dict.fromkeys(stats, 0.0), 0
    for rows in ([11], [2, 0, 5], [1, 3, 4, 6, 7, 8, 9, 10]):  # groups are torn apart: their advantages are known
        part = TokenBatch(
            behavior_logprobs=behavior[rows].flatten(),
            action_mask=mask[rows].flatten(),
            row=torch.arange(len(rows)).repeat_interleave(7),
            advantages=batch.advantages[rows],
            token_weights=batch.token_weights[rows],
            failures=batch.failures[rows],
            reference_logprobs=reference[rows].flatten(),
            kl_coefficient=0.1,
        )
        share, counts = policy_loss(algorithm, logprobs[rows].flatten(), part)
        total = total + share
        wrong += share.item() * mask.sum().item() / mask[rows].sum().item() / 3  # a token mean per microbatch
        for name, value in counts.items():
            sums[name] = max(sums[name], value.item()) if name.endswith("_max") else sums[name] + value.item()
    torch.testing.assert_close(torch.autograd.grad(total, logprobs)[0], gradient, rtol=1e-6, atol=0)
    assert total.item() == pytest.approx(loss.item(), rel=1e-5)
    assert wrong != pytest.approx(loss.item(), rel=0.05)
    assert sums == pytest.approx({name: value.item() for name, value in stats.items()}, rel=1e-5)
    assert set(stats) == {
        "rows", "policy_tokens", "retained_tokens", "clipped_tokens", "ratio", "ratio_max", "kl", "extreme_tokens",
        "logprob_difference", "logprob_difference_max", "loss",
    }  # fmt: skip
    slices = [slice(start, min(start + 9, 84)) for start in range(0, 84, 9)]
    whole = algorithm.token_loss(values.detach(), batch, batch.action_mask, slice(0, 84))
    parts = [algorithm.token_loss(values.detach()[part], batch, batch.action_mask, part) for part in slices]
    assert all(torch.equal(whole[index], torch.cat([part[index] for part in parts])) for index in range(2))


@pytest.mark.parametrize("rubbish", [NAN, INF, -INF, 1000.0, -1000.0])
def test_masked_positions_change_nothing(rubbish):
    arguments = random_batch(6, 6, 5)
    logprobs, behavior, reference, rewards, mask, groups = random_batch(6, 6, 5)
    with torch.no_grad():
        logprobs[~mask], behavior[~mask], reference[~mask] = rubbish, -rubbish, rubbish
    expected, _ = grpo_loss(*arguments[:2], *arguments[3:], reference_logprobs=arguments[2], kl_coefficient=0.1)
    loss, _ = grpo_loss(logprobs, behavior, rewards, mask, groups, reference_logprobs=reference, kl_coefficient=0.1)
    loss.backward()
    assert loss.item() == expected.item()
    assert (logprobs.grad[~mask] == 0).all()


def test_infinite_ratios():
    behavior, mask = torch.tensor([[-1001.0], [-1.0]]), torch.ones(2, 1, dtype=torch.bool)
    groups = torch.tensor([0, 0])
    for rewards, right in (([1.0, 1.0], [0, 0]), ([1.0, 0.0], [0, math.sqrt(0.5) / 2])):
        # At advantage 0 the ratio does not matter; above 0 it is clipped, and the gradient is 0.
        logprobs = torch.tensor([[-1.0], [-1.0]], requires_grad=True)
        loss, stats = grpo_loss(logprobs, behavior, torch.tensor(rewards), mask, groups, advantage_epsilon=0.0)
        loss.backward()
        assert torch.isfinite(loss)
        assert logprobs.grad.flatten().tolist() == pytest.approx(right)
        assert stats["extreme_tokens"].item() == 1
    with pytest.raises(ValueError, match=r"ratio to the behavior policy overflows float32.*rows \[0\]"):
        grpo_loss(logprobs, behavior, torch.tensor([0.0, 1.0]), mask, groups)
    with pytest.raises(ValueError, match=r"ratio of the reference overflows float32.*rows \[1\]"):
        options = {"reference_logprobs": torch.full((2, 1), -1.0), "kl_coefficient": 0.1}
        same = torch.tensor([[-1.0], [-101.0]])
        grpo_loss(same, same, torch.tensor([0.0, 1.0]), mask, groups, **options)


def test_refuses_a_group_of_one():
    for size in (1, 0, -8, 2.0, "8", True):
        with pytest.raises(ValueError, match=rf"group_size = {size!r}: must be an integer of at least 2"):
            GrpoSettings(group_size=size)
    with pytest.raises(ValueError, match=r"groups \[7\] hold one trajectory each: group_size"):
        Grpo().weigh(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([3, 3, 3]), torch.tensor([4, 7, 4]))
    assert (Grpo().group_size, Grpo(GrpoSettings(group_size=4)).group_size) == (8, 4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"clip_low": 1.5}, "clip_low = 1.5: must be a number from 0 to 1"),
        ({"clip_high": -0.1}, "clip_high = -0.1"),
        ({"clip_high": NAN}, "clip_high = nan"),
        ({"aggregation": "mean"}, "aggregation = 'mean': must be one of sample_mean, token_mean, sequence_sum"),
        ({"advantage_epsilon": NAN}, "advantage_epsilon = nan"),
    ],
)
def test_refuses_settings(settings, words):
    with pytest.raises(ValueError, match=words):
        GrpoSettings(**settings)


def test_refuses_impossible_input():
    logprobs, behavior, reference, rewards, mask, groups = random_batch(8, 4, 3)
    mask[1] = True
    with_reference = {"reference_logprobs": reference, "kl_coefficient": 0.1}
    for name, values in (("logprobs", logprobs), ("behavior_logprobs", behavior), ("reference_logprobs", reference)):
        for value in (NAN, -INF, 0.5):
            values = values.detach()
            kept, values[1, 2] = values[1, 2].item(), value
            with pytest.raises(ValueError, match=rf"^{name} must be finite and at most 0.*rows \[1\]"):
                grpo_loss(logprobs, behavior, rewards, mask, groups, **with_reference)
            values[1, 2] = kept
    with pytest.raises(ValueError, match="kl_coefficient = 0.1 needs reference_logprobs"):
        grpo_loss(logprobs, behavior, rewards, mask, groups, kl_coefficient=0.1)
    with pytest.raises(ValueError, match=r"rewards must be finite; trajectories \[0, 1, 2, 3\]"):
        grpo_loss(logprobs, behavior, rewards * NAN, mask, groups)
    with pytest.raises(ValueError, match=r"trajectories \[2\] have no action token"):
        Grpo().weigh(rewards, torch.tensor([1, 1, 0, 1]), groups)
    with pytest.raises(ValueError, match=r"groups must be \[B\]"):
        grpo_loss(logprobs, behavior, rewards, mask, groups[:2])


def test_reference_is_needed_only_with_a_coefficient():
    assert not Grpo().needs_reference
    algorithm = WithKl(Grpo(GrpoSettings(group_size=4)))
    assert algorithm.needs_reference and not algorithm.needs_entropy
    assert (algorithm.group_size, algorithm.Settings, algorithm.gates_trajectories) == (4, GrpoSettings, False)
    logprobs, behavior, _, rewards, mask, groups = random_batch(8, 4, 3)
    for value in (-1.0, INF):
        with pytest.raises(ValueError, match=f"kl_coefficient = {value}: must be a number from 0"):
            grpo_loss(logprobs, behavior, rewards, mask, groups, kl_coefficient=value)
