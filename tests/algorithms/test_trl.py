"""GRPO against formulas of TRL's trainer (trl 1.16, trainer/grpo_trainer.py), written out here in float64.

What TRL calls grpo, bnpo, dapo and dr_grpo are settings of ours; docs/grpo.md has the table.
"""

from __future__ import annotations

import pytest
import torch

from nemo_flashrl.algorithms import grpo_loss

LONGEST = 9  # TRL's max_completion_length
OURS = {
    "grpo": {"aggregation": "sample_mean"},
    "bnpo": {"aggregation": "token_mean"},
    "dapo": {"aggregation": "token_mean"},
    "dr_grpo": {"aggregation": "sequence_sum", "sequence_constant": LONGEST},
}


def trl_advantages(rewards, group_size, scale_rewards):
    """`_generate_and_score_completions`: groups are neighbours, std is divided by G - 1, 1e-4 is added to it."""
    mean = torch.nanmean(rewards.view(-1, group_size), dim=1).repeat_interleave(group_size)
    variance = ((rewards - mean) ** 2).view(-1, group_size).mean(1) * group_size / (group_size - 1)
    advantages = rewards - mean
    if scale_rewards != "none":
        advantages = advantages / (variance.sqrt().repeat_interleave(group_size) + 1e-4)
    return advantages


def trl_loss(logps, old_logps, ref_logps, advantages, mask, loss_type, beta=0.04, low=0.2, high=0.28):
    """`_compute_loss` in one process without accumulation."""
    coef_1 = torch.exp(logps - old_logps)
    coef_2 = torch.clamp(coef_1, 1 - low, 1 + high)
    per_token_loss = -torch.min(coef_1 * advantages.unsqueeze(1), coef_2 * advantages.unsqueeze(1))
    per_token_loss = per_token_loss + beta * (torch.exp(ref_logps - logps) - (ref_logps - logps) - 1)
    if loss_type == "grpo":
        return ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    if loss_type == "bnpo":
        return (per_token_loss * mask).sum() / mask.sum().clamp(min=1.0)
    if loss_type == "dr_grpo":
        return (per_token_loss * mask).sum() / (per_token_loss.size(0) * LONGEST)
    num_items_in_batch = mask.sum()  # over the whole batch and all processes
    return (per_token_loss * mask).sum() / num_items_in_batch.clamp(min=1.0)


@pytest.mark.parametrize("scale_rewards", ["group", "none"])
@pytest.mark.parametrize("loss_type", sorted(OURS))
def test_equals_trl(loss_type: str, scale_rewards: str) -> None:
    generator = torch.Generator().manual_seed(3)
    old = -3 * torch.rand(8, LONGEST, generator=generator, dtype=torch.float64) - 0.1
    noise = 0.4 * torch.randn(2, 8, LONGEST, generator=generator, dtype=torch.float64)
    current, reference = (old + noise).clamp(max=-1e-3)
    lengths = torch.tensor([9, 3, 1, 7, 5, 9, 2, 4])
    mask = torch.arange(LONGEST) < lengths[:, None]
    rewards = torch.tensor([1, 0, 0.5, 0, 2, 2, 2, -1], dtype=torch.float64)

    theirs = current.clone().requires_grad_()
    right = trl_loss(theirs, old, reference, trl_advantages(rewards, 4, scale_rewards), mask, loss_type)
    right.backward()

    def ours(**changed):
        logprobs = current.clone().requires_grad_()
        settings = {
            "clip_high": 0.28,
            "advantage_epsilon": 1e-4,
            "normalisation": "z_score" if scale_rewards == "group" else "none",
            **OURS[loss_type],
            **changed,
        }
        loss, stats = grpo_loss(
            logprobs,
            old,
            rewards,
            mask,
            torch.arange(8) // 4,
            reference_logprobs=reference,
            kl_coefficient=0.04,
            **settings,
        )
        loss.backward()
        assert stats["clipped_fraction"] > 0.1  # the clip is at work
        return loss, logprobs.grad

    loss, gradient = ours()
    assert loss.item() == pytest.approx(right.item(), rel=1e-12)
    torch.testing.assert_close(gradient, theirs.grad, rtol=1e-11, atol=1e-15)
    other = {"sample_mean": "token_mean"}.get(OURS[loss_type]["aggregation"], "sample_mean")
    assert ours(aggregation=other)[0].item() != pytest.approx(right.item(), rel=1e-3)
