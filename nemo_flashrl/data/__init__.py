"""A collected batch -> the microbatches of every data-parallel rank.

length_batcher.py   what a user sets and gets: BatchingSettings, LengthBatcher.plan -> Plan
arrangement.py      sorted lengths -> bins, for the two layouts
bin_packing.py      packed: the fewest bins, and the proof of how few that is
row_grouping.py     padded: runs of sorted rows with the least padding
balancing.py        exchanges that make ranks cost the same
segment_sizes.py    tokens, padding and cost of trajectories of several segments
packing.py          one microbatch of trajectories -> tensors
datamodule.py       the Lightning side
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "BatchingSettings": "length_batcher",
    "LengthBatcher": "length_batcher",
    "RolloutDataModule": "datamodule",
}  # read on first use: a planner needs no NeMo

__all__ = ["BatchingSettings", "LengthBatcher", "RolloutDataModule"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
