"""Policy-gradient losses as pure functions of tensors; a new one is a new file here, or a dotted path elsewhere."""

from __future__ import annotations

from nemo_flashrl.algorithms.advantages import group_advantages
from nemo_flashrl.algorithms.algorithm import Algorithm
from nemo_flashrl.algorithms.flash_reinforce import FlashReinforceSettings, flash_reinforce_loss
from nemo_flashrl.algorithms.grpo import GrpoSettings, grpo_loss
from nemo_flashrl.plugins import load_class

__all__ = [
    "Algorithm",
    "FlashReinforceSettings",
    "GrpoSettings",
    "flash_reinforce_loss",
    "group_advantages",
    "grpo_loss",
    "load",
]


def load(name: str) -> type:
    """The algorithm class of a bare name ("flash_reinforce", "grpo") or of a dotted path "package.module.Class".

    Raises:
        ValueError: nothing has that name; the message lists those available.
    """
    return load_class(__name__, name)
