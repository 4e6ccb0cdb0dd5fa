"""From rewards to advantages: normalisations, tied groups, shaping, clips, turns, baselines of earlier batches."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from nemo_flashrl.algorithms import group_advantages
from nemo_flashrl.algorithms.advantages import CreditRules, LengthPenalty, Outcomes
from nemo_flashrl.algorithms.flash_reinforce import FlashReinforce, FlashReinforceSettings
from nemo_flashrl.algorithms.grpo import Grpo, GrpoSettings


def outcomes(rewards, groups=None, counts=None, shaping=None, left_out=None, turn_rewards=()) -> Outcomes:
    size = len(rewards)
    return Outcomes(
        rewards=torch.tensor(rewards),
        action_counts=torch.tensor(counts or [4] * size),
        groups=torch.tensor(groups or [0] * size),
        shaping=torch.tensor(shaping or [0.0] * size),
        left_out=torch.tensor(left_out or [False] * size),
        turn_rewards=[torch.tensor(own) for own in turn_rewards],
    )


def test_quantile_by_hand() -> None:
    """Rewards 3, 1, 1, 8: below + half of equal = 2.5, 1, 1, 3.5 of 4. A second group is ranked on its own."""
    rewards = torch.tensor([3.0, 1.0, -7.0, 1.0, 8.0, -9.0])
    groups = torch.tensor([5, 5, 2, 5, 5, 2])
    advantages = group_advantages(rewards, groups, normalisation="quantile")
    assert advantages.tolist() == pytest.approx([0.25, -0.5, 0.5, -0.5, 0.75, -0.5])
    assert group_advantages(rewards, torch.zeros(6), normalisation="quantile")[2] != 0.5


def test_an_outlier_moves_the_others_by_its_rank_alone() -> None:
    groups = torch.zeros(8, dtype=torch.int64)
    few, many = torch.zeros(8), torch.tensor([0, 0, 0, 0.1, 0.2, 0.3, 0.4, 0.5])
    for outlier in (1.0, 100.0, 1e6):
        few[0] = outlier
        assert group_advantages(few, groups, normalisation="quantile").tolist() == pytest.approx([7 / 8] + [-1 / 8] * 7)
    others = []
    for top in (0.6, 100.0):
        rewards = torch.cat([many[1:], torch.tensor([top])])
        others.append({n: group_advantages(rewards, groups, normalisation=n)[:-1] for n in ("quantile", "z_score")})
    assert torch.equal(others[0]["quantile"], others[1]["quantile"])
    # The z-score of the others is crushed from a spread of about 2 to one of 0.01.
    assert others[0]["z_score"].max() - others[0]["z_score"].min() > 1.5
    assert others[1]["z_score"].max() - others[1]["z_score"].min() < 0.02


def test_no_normalisation_by_hand() -> None:
    rewards, groups = torch.tensor([3.0, 1.0, 10.0, 0.0]), torch.tensor([0, 0, 1, 1])
    assert group_advantages(rewards, groups, normalisation="none").tolist() == [1, -1, 5, -5]
    assert group_advantages(torch.full((7,), 0.1), torch.zeros(7), normalisation="none").tolist() == [0] * 7
    with pytest.raises(ValueError, match="normalisation = 'rank': must be one of z_score, quantile, none"):
        GrpoSettings(normalisation="rank")


def test_failed_and_tied_groups() -> None:
    """Groups: all 0, all 1, and 1 with 0. The floor is of the first, the skip of what is left without a difference."""
    rewards, groups = torch.tensor([0.0, 0, 1, 1, 1, 0]), torch.tensor([0, 0, 1, 1, 2, 2])
    counts = torch.tensor([2, 1, 1, 1, 1, 1])
    half = math.sqrt(0.5)

    def weighed(**settings):
        answer = Grpo(GrpoSettings(group_size=2, advantage_epsilon=0.0, **settings)).weigh(rewards, counts, groups)
        return [values.tolist() for values in answer]

    plain = [0, 0, 0, 0, half, -half], [1 / 12, *[1 / 6] * 5]
    assert weighed() == [pytest.approx(values) for values in plain]
    assert weighed(failed_group_floor=0.3)[0] == pytest.approx([-0.3, -0.3, 0, 0, half, -half])
    assert weighed(skip_tied_groups=True)[1] == pytest.approx([0, 0, 0, 0, 1 / 6, 1 / 6])  # B stays 6
    assert weighed(skip_tied_groups=True, failed_group_floor=0.3)[1] == pytest.approx(
        [1 / 12, 1 / 6, 0, 0, 1 / 6, 1 / 6]
    )


def plain_advantages(rewards: list[float], groups: list[int], normalisation: str, floor: float) -> list[float]:
    """Reward by reward, in plain Python."""
    advantages = []
    for reward, group in zip(rewards, groups, strict=True):
        own = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if min(own) == max(own):
            advantages.append(-floor if own[0] == 0 else 0.0)
        elif normalisation == "quantile":
            below, equal = sum(r < reward for r in own), sum(r == reward for r in own)
            advantages.append(2 * (below + equal / 2) / len(own) - 1)
        else:
            std = statistics.stdev(own) + 1e-6 if normalisation == "z_score" else 1.0
            advantages.append((reward - statistics.fmean(own)) / std)
    return advantages


@pytest.mark.parametrize("floor", [0.0, 0.3])
@pytest.mark.parametrize("normalisation", ["z_score", "quantile", "none"])
def test_groups_of_different_sizes(normalisation: str, floor: float) -> None:
    """64 trajectories in groups of 2, 4, 8 and 16, in any order: float64 against plain Python.

    Rewards reshaped to [B / G, G] at the mean G, as if all groups were equal, give others.
    """
    generator = torch.Generator().manual_seed(3)
    sizes = [2, 2, 2, 2, 4, 4, 8, 8, 16, 16]
    names = torch.randperm(90, generator=generator)[: len(sizes)] - 40
    groups = names.repeat_interleave(torch.tensor(sizes))
    rewards = torch.randint(0, 3, (64,), generator=generator).double() / 2
    rewards[:2], rewards[8:12], rewards[12:16] = 1.0, 0.0, 0.5  # tied at 1, at 0 and at 1/2
    order = torch.randperm(64, generator=generator)
    for places in (torch.arange(64), order):
        own, of = rewards[places], groups[places]
        algorithm = Grpo(GrpoSettings(normalisation=normalisation, failed_group_floor=floor, skip_tied_groups=True))
        advantages, weights = algorithm.weigh(own, torch.full((64,), 5), of)
        right = torch.tensor(plain_advantages(own.tolist(), of.tolist(), normalisation, floor), dtype=torch.float64)
        torch.testing.assert_close(advantages, right, rtol=1e-12, atol=1e-12)
        kept = torch.tensor([rewards[groups == g].unique().numel() > 1 for g in of])
        kept |= torch.tensor([floor > 0 and not rewards[groups == g].any() for g in of])
        torch.testing.assert_close(weights, kept.double() / (64 * 5))
    rows = rewards.view(8, 8)
    equal = rows - rows.mean(1, keepdim=True)
    equal = equal / (rows.std(1, keepdim=True) + 1e-6) if normalisation == "z_score" else equal
    wrong = plain_advantages(rewards.tolist(), [i // 8 for i in range(64)], normalisation, 0.0)
    if normalisation != "quantile":
        torch.testing.assert_close(equal.flatten(), torch.tensor(wrong, dtype=torch.float64))
    right = torch.tensor(plain_advantages(rewards.tolist(), groups.tolist(), normalisation, floor))
    assert (right - torch.tensor(wrong)).abs().max() > 0.2


def test_the_sequence_constant_divides() -> None:
    algorithm = Grpo(GrpoSettings(group_size=2, aggregation="sequence_sum", sequence_constant=10))
    _, weights = algorithm.weigh(torch.tensor([1.0, 0]), torch.tensor([3, 7]), torch.tensor([0, 0]))
    assert weights.tolist() == pytest.approx([1 / 20, 1 / 20])


def test_shaping_is_added_after_the_normalisation() -> None:
    """Rewards 1, 0 have z-scores +-sqrt(1/2); shaping 0.5 on the first goes on top of its own, and nowhere else."""
    credit = CreditRules().assign(Grpo(GrpoSettings(group_size=2)), outcomes([1.0, 0.0], shaping=[0.5, 0.0]))
    half = math.sqrt(0.5)
    assert credit.advantages.tolist() == pytest.approx([half + 0.5, -half], rel=1e-5)
    inside = group_advantages(torch.tensor([1.5, 0.0]), torch.tensor([0, 0]))  # scaled away: the wrong answer
    assert inside.tolist() == pytest.approx([half, -half], rel=1e-5)


def test_the_clip_holds_for_what_is_trained_on() -> None:
    """One success in 32: z-score (31/32) / std = sqrt(31 * 31/32) = 5.48. Clipped to 3; the others stay."""
    rewards = [1.0] + [0.0] * 31
    assert Grpo().weigh(*(torch.tensor(v) for v in (rewards, [1] * 32, [0] * 32)))[0][0].item() == pytest.approx(
        31 / math.sqrt(32), rel=1e-4
    )
    credit = CreditRules(clip=3.0).assign(Grpo(), outcomes(rewards, shaping=[0.0] * 31 + [-9.0]))
    assert credit.advantages[[0, 31]].tolist() == [3, -3]
    assert credit.advantages[1].item() == pytest.approx(-1 / math.sqrt(32), rel=1e-4)
    assert credit.clipped == 2 / 32


def test_what_is_left_out_has_no_weight_and_stays_in_the_baseline() -> None:
    """Rewards 1, 0, 0.5: mean 0.5 with the one that is left out, 0.75 without it."""
    given = outcomes([1.0, 0.0, 0.5], counts=[2, 0, 4], left_out=[False, True, False])
    credit = CreditRules().assign(FlashReinforce(), given)
    assert credit.advantages.tolist() == [0.5, -0.5, 0]
    assert credit.token_weights.tolist() == pytest.approx([1 / 6, 0, 1 / 12])


def test_turns_by_hand() -> None:
    """Discount 1/2; turn rewards (0, 1) and (0, 0, 2): returns (1/2, 1) and (1/2, 1, 2), means 3/4 and 7/6.

    The baseline is 23/24; outcome rewards 1 and 2 have advantages -1/2 and 1/2.
    """
    given = outcomes([1.0, 2.0], shaping=[0.0, 0.1], turn_rewards=[[0.0, 1.0], [0.0, 0.0, 2.0]])
    own = CreditRules(turn_coefficient=1.0, turn_discount=0.5).assign(FlashReinforce(), given).turn_advantages
    base = 23 / 24
    assert own[0].tolist() == pytest.approx([0.5 - base, 1 - base])
    assert own[1].tolist() == pytest.approx([0.6 - base, 1.1 - base, 2.1 - base])
    mixed = CreditRules(turn_coefficient=0.25, turn_discount=0.5).assign(FlashReinforce(), given)
    assert mixed.turn_advantages[0].tolist() == pytest.approx([-0.375 + (0.5 - base) / 4, -0.375 + (1 - base) / 4])
    assert mixed.advantages[0].item() == pytest.approx(mixed.turn_advantages[0].mean().item())


def test_turns_without_discount_and_one_reward_at_the_end_are_the_plain_algorithm() -> None:
    given = outcomes([1.0, 0.0, 0.0], turn_rewards=[[0.0, 0.0, 1.0], [0.0], [0.0, 0.0]])
    plain = CreditRules().assign(FlashReinforce(), given).advantages
    for coefficient in (0.3, 1.0):
        turns = CreditRules(turn_coefficient=coefficient).assign(FlashReinforce(), given).turn_advantages
        for advantage, own in zip(plain, turns, strict=True):
            torch.testing.assert_close(own, advantage.expand(len(own)))


def test_length_penalty_by_hand() -> None:
    """Limit 100, coefficient 0.4: nothing up to it, 0.2 at 150, 0.8 at 300; a quarter of the way, three quarters."""
    lengths = torch.tensor([0, 100, 150, 300])
    assert LengthPenalty(0.4, 100)(lengths, step=10**6).tolist() == pytest.approx([0, 0, 0.2, 0.8])
    decaying = LengthPenalty(0.4, 100, decay_steps=20)
    assert decaying(lengths, step=5).tolist() == pytest.approx([0, 0, 0.15, 0.6])
    assert decaying(lengths, step=20).tolist() == decaying(lengths, step=90).tolist() == [0] * 4


def weigh(algorithm: FlashReinforce, rewards: list[float]) -> list[float]:
    return algorithm.weigh(torch.tensor(rewards), torch.ones(len(rewards)), torch.arange(len(rewards)))[0].tolist()


def test_baselines_of_earlier_batches() -> None:
    """Batch means 1/2, 1, 0, a window of two: the third has baseline (1/2 + 1) / 2 = 3/4, with its own mean 3/8."""
    batches = [[1.0, 0.0], [2.0, 0.0], [1.0, -1.0], [0.0, 0.0]]
    window = FlashReinforce(FlashReinforceSettings(baseline="window", baseline_window=2))
    both = FlashReinforce(FlashReinforceSettings(baseline="both", baseline_window=2))
    seen = {"window": [], "both": []}
    for rewards in batches:
        for name, algorithm in (("window", window), ("both", both)):
            algorithm.next_batch()
            weigh(algorithm, [9.0, 9.0])  # a first look at the batch with other rewards leaves no trace
            seen[name].append(weigh(algorithm, rewards))
    assert seen["window"] == [[0.5, -0.5], [1.5, -0.5], [0.25, -1.75], [-0.5, -0.5]]
    assert seen["both"] == [[0.5, -0.5], [1.25, -0.75], [0.625, -1.375], [-0.25, -0.25]]


def test_the_window_goes_on_after_a_resume() -> None:
    settings = FlashReinforceSettings(baseline="window", baseline_window=3)
    first, second = FlashReinforce(settings), FlashReinforce(settings)
    for rewards in ([1.0, 0.0], [4.0, 2.0]):
        first.next_batch()
        weigh(first, rewards)
    second.load_state_dict(first.state_dict())
    for algorithm in (first, second):
        algorithm.next_batch()
    assert weigh(first, [0.0, 1.0]) == weigh(second, [0.0, 1.0]) == [-1.75, -0.75]
    fresh = FlashReinforce(settings)
    fresh.next_batch()
    assert weigh(fresh, [0.0, 1.0]) == [-0.5, 0.5]


def test_batch_standard_deviation() -> None:
    """Rewards 3, 1, 1, 1: mean 1.5, deviations 1.5 and -0.5, root mean square sqrt(3)/2."""
    root = math.sqrt(3)
    algorithm = FlashReinforce(FlashReinforceSettings(normalise=True))
    assert weigh(algorithm, [3.0, 1.0, 1.0, 1.0]) == pytest.approx([root, *[-1 / root] * 3], rel=1e-5)
    assert weigh(algorithm, [0.1] * 7) == [0] * 7
    windowed = FlashReinforce(FlashReinforceSettings(normalise=True, baseline="window"))
    weigh(windowed, [1.0, 1.0])
    windowed.next_batch()
    assert weigh(windowed, [0.0, 0.0]) == pytest.approx([-1, -1], rel=1e-5)  # a bounded step, not one by 1e6


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"baseline": "group"}, "baseline = 'group': must be one of batch, window, both"),
        ({"baseline_window": 0}, "baseline_window = 0: must be an integer of at least 1"),
        ({"ratio_clip": -0.1}, "ratio_clip = -0.1"),
    ],
)
def test_refuses_settings(settings, words) -> None:
    with pytest.raises(ValueError, match=words):
        FlashReinforceSettings(**settings)
