"""The learning rate of each step, as the optimizer has it."""

from __future__ import annotations

import pytest
import torch

from nemo_flashrl.models.lr_schedule import LearningRateScheduler


def rates(scheduler: LearningRateScheduler, steps: int, resumed_at: int | None = None) -> list[float]:
    def new():
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.01)
        return optimizer, scheduler(None, optimizer)["lr_scheduler"]["scheduler"]

    (optimizer, schedule), seen = new(), []
    for step in range(steps):
        if step == resumed_at:
            saved = optimizer.state_dict(), schedule.state_dict()
            optimizer, schedule = new()
            optimizer.load_state_dict(saved[0])
            schedule.load_state_dict(saved[1])
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


def test_warm_up_begins_at_a_fifth() -> None:
    """Four steps from 1/5 to 1 exclusive, in steps of 1/5; then constant."""
    right = [0.002, 0.004, 0.006, 0.008, 0.01, 0.01, 0.01]
    assert rates(LearningRateScheduler(4, 7), 7) == pytest.approx(right)
    assert rates(LearningRateScheduler(0, 3), 3) == [0.01] * 3


def test_cosine_by_hand() -> None:
    """Two steps of warm-up, then (1 + cos(pi n / 4)) / 2 for n = 0 to 3."""
    right = [0.002, 0.006, 0.01, 0.00853553, 0.005, 0.00146447]
    assert rates(LearningRateScheduler(2, 6, "cosine"), 6) == pytest.approx(right, rel=1e-5)
    assert rates(LearningRateScheduler(6, 6, "cosine"), 6)[-1] == pytest.approx(0.01 * (0.2 + 0.8 * 5 / 6))


@pytest.mark.parametrize("resumed_at", [1, 4])
def test_goes_on_after_a_resume(resumed_at: int) -> None:
    scheduler = LearningRateScheduler(3, 8, "cosine")
    assert rates(scheduler, 8, resumed_at) == rates(scheduler, 8)


def test_a_longer_run_resumes_on_its_own_schedule() -> None:
    """A cosine over 2 steps ends near 0; over 6, two of them done, it is at (1 + cos(pi / 3)) / 2 = 3/4."""
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=1e-3, betas=(0.9, 0.95))
    short = LearningRateScheduler(0, 2, "cosine")(None, optimizer)["lr_scheduler"]["scheduler"]
    for _ in range(2):
        optimizer.step()
        short.step()
    changed = {"lr": 1e-3, "betas": (0.8, 0.99), "weight_decay": 0.1, "eps": 1e-6}
    resumed = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], **changed)
    longer = LearningRateScheduler(0, 6, "cosine")(None, resumed)["lr_scheduler"]["scheduler"]
    resumed.load_state_dict(optimizer.state_dict())
    longer.load_state_dict(short.state_dict())
    (group,) = resumed.param_groups
    assert group["lr"] == pytest.approx(7.5e-4) and longer.get_last_lr() == [group["lr"]]
    assert {name: group[name] for name in changed} == changed | {"lr": group["lr"]}
    resumed.step()
    longer.step()
    assert group["lr"] == pytest.approx(5e-4)
