"""A collected batch -> this rank's microbatches, as tensors.

datamodule.py         the Lightning side: collect, weigh, plan, hand each rank its share
credit.py             rewards -> what each trajectory, each turn, and each token is trained on
collate.py            one microbatch of trajectories -> tensors
rank_step.py          one rank's share of a step, and what a callback may change of it
context_parallel.py   a rank's share of a row
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "BatchingSettings": "nemo_flashrl.batching.planner",
    "LengthBatcher": "nemo_flashrl.batching.planner",
    "RolloutDataModule": "nemo_flashrl.data.datamodule",
}  # read on first use: a planner needs no NeMo

__all__ = ["BatchingSettings", "LengthBatcher", "RolloutDataModule"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
