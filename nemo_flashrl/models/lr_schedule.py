"""The learning rate of each optimizer step, through NeMo's scheduler seam.

NeMo's own warm-ups begin at 0, where a first step is lost; a policy-gradient run of a hundred steps has none to lose.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from nemo.lightning.pytorch.optim.base import LRSchedulerModule
from torch.optim.lr_scheduler import LambdaLR

FIRST_SHARE = 0.2


class _Schedule(LambdaLR):
    """Torch's, of which a checkpoint keeps how far it is; the settings are those that the run was started with.

    Megatron saves every parameter group whole, learning rate, weight decay, betas and epsilon with it, and Lightning
    restores the optimizer before the schedule: what `load_state_dict` puts back here stands when training starts.
    """

    def __init__(self, optimizer: Any, share: Callable[[int], float]) -> None:
        self._started_with = [_settings(group) for group in optimizer.param_groups]
        super().__init__(optimizer, share)

    def state_dict(self) -> dict[str, Any]:
        """Optimizer steps done; Lightning's hook."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Be where `state_dict` was, with the settings of this run."""
        self.last_epoch = int(state_dict["last_epoch"])
        self._step_count = self.last_epoch + 1
        for group, settings in zip(self.optimizer.param_groups, self._started_with, strict=True):
            group.update(settings, initial_lr=settings["lr"], lr=settings["lr"] * self.lr_lambdas[0](self.last_epoch))
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """What a parameter group says of how it is trained; parameters and the count of steps are its state."""
    return {name: value for name, value in group.items() if name not in ("params", "step")}


class LearningRateScheduler(LRSchedulerModule):
    """Linear warm-up from a fifth, then constant, or a cosine that would be 0 one step after the last.

    Args:
        warmup_steps: steps below the full rate.
        steps: of the whole run.
        schedule: "constant" or "cosine", after the warm-up.
    """

    def __init__(self, warmup_steps: int, steps: int, schedule: str = "constant") -> None:
        super().__init__()
        self.warmup_steps, self.steps, self.schedule = warmup_steps, steps, schedule

    def scheduler(self, model: Any, optimizers: Any) -> dict[str, Any]:
        """What Lightning steps once an optimizer step."""
        return {
            "optimizer": optimizers,
            "lr_scheduler": {"scheduler": _Schedule(optimizers, self.share), "interval": "step", "frequency": 1},
            "monitor": "loss",
        }

    def share(self, step: int) -> float:
        """Of the full learning rate, in the step that comes after `step` steps."""
        if step < self.warmup_steps:
            return FIRST_SHARE + (1 - FIRST_SHARE) * step / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        done = (step - self.warmup_steps) / max(self.steps - self.warmup_steps, 1)
        return (1 + math.cos(math.pi * min(done, 1.0))) / 2
