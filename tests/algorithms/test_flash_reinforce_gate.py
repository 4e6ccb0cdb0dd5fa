"""What FlashREINFORCE decides over whole trajectories: the gate, the ratio guard, the entropy filter."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from nemo_flashrl.algorithms import flash_reinforce_loss
from nemo_flashrl.algorithms.algorithm import TokenBatch
from nemo_flashrl.algorithms.flash_reinforce import FlashReinforce, FlashReinforceSettings
from nemo_flashrl.algorithms.unfused_loss import policy_loss

INF, NAN = math.inf, math.nan


def flat(logprobs, behavior, rewards, mask, algorithm):
    """A rectangle [B, T] as the trainer's flat batch: its log-probs and the rest."""
    advantages, weights = algorithm.weigh(rewards, mask.sum(1), torch.zeros(len(rewards), dtype=torch.int64))
    row = torch.arange(len(rewards)).repeat_interleave(mask.shape[1])
    failures = torch.zeros(len(rewards), dtype=torch.bool)
    return logprobs.flatten(), TokenBatch(behavior.flatten(), mask.flatten(), row, advantages, weights, failures)


def test_infinite_ratio_at_advantage_zero_is_zero():
    algorithm = FlashReinforce(FlashReinforceSettings(delta=INF, ratio_guard=INF))
    logprobs, behavior = torch.tensor([[-1.0], [-1.0]], requires_grad=True), torch.tensor([[-1001.0], [-1.0]])
    mask = torch.ones(2, 1, dtype=torch.bool)
    loss, _ = policy_loss(algorithm, *flat(logprobs, behavior, torch.tensor([1.0, 1.0]), mask, algorithm))
    loss.backward()
    assert (loss.item(), logprobs.grad.tolist()) == (0, [[0], [0]])
    with pytest.raises(ValueError, match=r"overflows float32.*rows \[0\] have \[1000"):
        policy_loss(algorithm, *flat(logprobs, behavior, torch.tensor([1.0, 0.0]), mask, algorithm))
    # Rejected by the gate, or with the ratio out of use, the same token is no error.
    for settings in (FlashReinforceSettings(ratio_guard=INF), FlashReinforceSettings(INF, False, 1.0, INF)):
        algorithm = FlashReinforce(settings)
        loss, _ = policy_loss(algorithm, *flat(logprobs, behavior, torch.tensor([1.0, 0.0]), mask, algorithm))
        assert torch.isfinite(loss)


@pytest.mark.parametrize("delta", [3e-3, 0.0])
@pytest.mark.parametrize("highest", [-1e-7, -1e-3, -0.5, -5.0])
def test_on_policy_noise_is_not_rejected(delta, highest):
    # In float32, with p = exp(logmu) near 1/2, the two terms of D cancel to noise of 1e-8 of either sign.
    generator = torch.Generator().manual_seed(12)
    behavior = highest * (1 + torch.rand(64, 3, generator=generator))
    logprobs = (behavior + 1e-7 * torch.randn(64, 3, generator=generator)).clamp(max=0)
    _, stats = flash_reinforce_loss(
        logprobs, behavior, torch.randn(64), torch.ones(64, 3, dtype=torch.bool), delta=delta
    )
    assert stats["acceptance_rate"].item() == 1
    assert (stats["sequence_kl"] >= 0).all()
    # A difference that is no rounding is rejected at delta 0, though D is only about 1e-8 p / (1 - p).
    _, stats = flash_reinforce_loss(
        logprobs - 1e-4, behavior, torch.randn(64), torch.ones(64, 3, dtype=torch.bool), delta=0.0
    )
    assert stats["acceptance_rate"].item() == 0


def test_divergence_is_never_negative():
    # True values near 1e-17, next to terms whose rounding is 1e-16: without the maximum some come out below 0.
    behavior = -9 - 2 * torch.rand(500, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _, stats = flash_reinforce_loss(
        behavior + 2e-6, behavior, torch.zeros(500), torch.ones(500, 1, dtype=torch.bool), delta=0.0
    )
    assert (stats["sequence_kl"] >= 0).all()


def test_probabilities_are_clamped_before_the_divergence():
    # Row 0: p = 1e-8 becomes 1e-6, q = 1/2. Row 1: p = 1/2, q = 1 - 1e-9 becomes 1 - 1e-6.
    behavior = torch.tensor([[1e-8], [0.5]], dtype=torch.float64).log()
    logprobs = torch.tensor([[0.5], [1 - 1e-9]], dtype=torch.float64).log()
    _, stats = flash_reinforce_loss(logprobs, behavior, torch.zeros(2), torch.ones(2, 1, dtype=torch.bool))
    first = 1e-6 * math.log(2e-6) + (1 - 1e-6) * math.log(2 * (1 - 1e-6))
    second = math.log(0.5 / (1 - 1e-6)) / 2 + math.log(0.5e6) / 2
    assert stats["sequence_kl"].tolist() == pytest.approx([first, second], rel=1e-9)


def test_ratio_guard_drops_what_the_divergence_cannot_see():
    # p and q are both clamped to 1e-6: D = 0, and rho = e^46.
    logprobs = torch.tensor([[-14.0, -1.0], [-1.0, -1.0], [-2.0, -2.0]], requires_grad=True)
    behavior = torch.tensor([[-60.0, -1.0], [-1.0, -1.0], [-2.0, -2.0]])
    rewards, mask = torch.tensor([1.0, 0.0, 2.0]), torch.ones(3, 2, dtype=torch.bool)
    loss, stats = flash_reinforce_loss(logprobs, behavior, rewards, mask)
    loss.backward()
    assert stats["sequence_kl"].tolist() == [0, 0, 0]
    assert stats["admitted"].tolist() == [False, True, True]
    assert stats["guarded"].tolist() == [True, False, False]
    assert (stats["extreme_tokens"].item(), stats["ratio_max"].item()) == (1, 1)
    # Still three trajectories: A = 0, -1, 1, and each token counts 1 / (3 * 2).
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.0, 0.0], [1 / 6, 1 / 6], [-1 / 6, -1 / 6]]))
    algorithm = FlashReinforce(FlashReinforceSettings(ratio_guard=INF))
    gate = algorithm.gate(*flat(logprobs.detach(), behavior, rewards, mask, algorithm))
    assert gate.per_row["admitted"].tolist() == [True, True, True]
    assert gate.stats["extreme_tokens"].item() == 1
    assert gate.stats["ratio_max"].item() == pytest.approx(math.exp(46), rel=1e-6)
    assert gate.stats["logprob_difference_max"].item() == 46


def test_a_trajectory_of_two_segments_counts_once():
    # Rows are trajectories: row 0 comes in two pieces around row 1. Mean reward 1/2; 2/3 would count pieces.
    algorithm = FlashReinforce(FlashReinforceSettings(delta=INF))
    advantages, weights = algorithm.weigh(torch.tensor([1.0, 0.0]), torch.tensor([3, 1]), torch.tensor([0, 1]))
    assert advantages.tolist() == [0.5, -0.5]
    assert weights.tolist() == pytest.approx([1 / 6, 1 / 2])
    # The gate looks at the whole trajectory: D of the pieces are 0 and 1/2 ln(4/3) = 0.144, of the whole a third of it.
    half, three = math.log(1 / 2), math.log(3 / 4)
    batch = TokenBatch(
        behavior_logprobs=torch.tensor([half, half, half, half]),
        action_mask=torch.ones(4, dtype=torch.bool),
        row=torch.tensor([0, 0, 1, 0]),
        advantages=advantages,
        token_weights=weights,
        failures=torch.tensor([False, False]),
    )
    gate = FlashReinforce(FlashReinforceSettings(delta=0.05)).gate(torch.tensor([half, half, half, three]), batch)
    assert gate.per_row["sequence_kl"].tolist() == pytest.approx([math.log(4 / 3) / 6, 0], abs=1e-7)
    assert gate.keep.tolist() == [True, True, True, True]
    gate = FlashReinforce(FlashReinforceSettings(delta=0.04)).gate(torch.tensor([half, half, half, three]), batch)
    assert gate.keep.tolist() == [False, False, True, False]


def test_high_entropy_filter_by_hand():
    # Both rows have 4 action tokens; q = 1/2 keeps 2. Row 0 failed with the better reward: the flag decides, not A.
    # Entropies of row 0: 1, 3, (9 is masked), 3, 3: three tie for two places, the earlier two win.
    mask = torch.tensor([[True, True, False, True, True], [True, True, True, True, False]])
    entropies = torch.tensor([[1.0, 3.0, 9.0, 3.0, 3.0], [1.0, 2.0, 3.0, 4.0, NAN]])
    logprobs = torch.full((2, 5), -1.0, requires_grad=True)
    loss, stats = flash_reinforce_loss(
        logprobs,
        logprobs.detach(),
        torch.tensor([1.0, 0.0]),
        mask,
        negative_token_fraction=0.5,
        entropies=entropies,
        failures=torch.tensor([True, False]),
    )
    loss.backward()
    # Each token counts A / (B T_i) = 1/2 / 8, with the filtered ones still in T_i (1/2 / 4 without them).
    right = torch.tensor([[0, -1 / 16, 0, -1 / 16, 0], [1 / 16, 1 / 16, 1 / 16, 1 / 16, 0]])
    torch.testing.assert_close(logprobs.grad, right)
    assert (stats["policy_tokens"].item(), stats["retained_tokens"].item()) == (8, 6)


def test_filter_keeps_exactly_the_ceiling():
    # 0.28 * 25 = 7.000000000000001 in floating point, and its ceiling is 8; the right count is 7.
    counts = torch.arange(1, 61)
    row = torch.arange(60).repeat_interleave(counts)
    batch = TokenBatch(
        behavior_logprobs=torch.full((len(row),), -1.0),
        action_mask=torch.ones(len(row), dtype=torch.bool),
        row=row,
        advantages=torch.ones(60),
        token_weights=torch.ones(60),
        failures=torch.ones(60, dtype=torch.bool),
        entropies=torch.rand(len(row)),
    )
    assert math.ceil(0.28 * 25) == 8
    for percent in range(100):
        fraction = percent / 100
        gate = FlashReinforce(FlashReinforceSettings(negative_token_fraction=fraction)).gate(
            batch.behavior_logprobs, batch
        )
        right = [math.ceil(Fraction(percent, 100) * count) for count in counts.tolist()]
        assert torch.bincount(row[gate.keep], minlength=60).tolist() == right, fraction
