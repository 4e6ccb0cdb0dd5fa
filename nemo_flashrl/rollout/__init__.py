"""Sampling: engines, the agent loop, the collector. Imports no trainer.

Collector (collector.py) --episode--> run_episode (agent.py) --ids--> Engine (engine.py; *_engine.py)
     |  PromptStream (prompts.py)          |--text, by Codec (codec.py)--> Environment (environments/)
     +--> Batch (records.py)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nemo_flashrl.environments.environment import Environment
from nemo_flashrl.rollout.engine import Engine

if TYPE_CHECKING:
    from nemo_flashrl.rollout.transformers_engine import TransformersEngine

__all__ = ["Engine", "Environment", "TransformersEngine"]

_LAZY = {"TransformersEngine": "nemo_flashrl.rollout.transformers_engine"}  # imports transformers


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
