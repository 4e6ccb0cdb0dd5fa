"""The learning rate of each optimizer step, through NeMo's scheduler seam.

NeMo's own warm-ups begin at 0, where a first step is lost; a policy-gradient run of a hundred steps has none to lose.
"""

from __future__ import annotations

import math
from typing import Any

from nemo.lightning.pytorch.optim.base import LRSchedulerModule
from torch.optim.lr_scheduler import LambdaLR

FIRST_SHARE = 0.2


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
            "lr_scheduler": {"scheduler": LambdaLR(optimizers, self.share), "interval": "step", "frequency": 1},
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
