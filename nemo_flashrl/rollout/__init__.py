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
    from nemo_flashrl.records import Sampling
    from nemo_flashrl.rollout.adapter_engine import AdapterEngine
    from nemo_flashrl.rollout.agent import Limits
    from nemo_flashrl.rollout.broadcast_engine import BroadcastEngine
    from nemo_flashrl.rollout.collector import Collector
    from nemo_flashrl.rollout.driver import RolloutDriver
    from nemo_flashrl.rollout.sglang_engine import SGLangEngine
    from nemo_flashrl.rollout.transformers_engine import TransformersEngine
    from nemo_flashrl.rollout.vllm_engine import VLLMEngine

__all__ = [
    "AdapterEngine",
    "BroadcastEngine",
    "Collector",
    "Engine",
    "Environment",
    "Limits",
    "RolloutDriver",
    "SGLangEngine",
    "Sampling",
    "TransformersEngine",
    "VLLMEngine",
]

_LAZY = {
    "AdapterEngine": "nemo_flashrl.rollout.adapter_engine",
    "BroadcastEngine": "nemo_flashrl.rollout.broadcast_engine",
    "Collector": "nemo_flashrl.rollout.collector",
    "Limits": "nemo_flashrl.rollout.agent",
    "RolloutDriver": "nemo_flashrl.rollout.driver",
    "SGLangEngine": "nemo_flashrl.rollout.sglang_engine",
    "Sampling": "nemo_flashrl.records",
    "TransformersEngine": "nemo_flashrl.rollout.transformers_engine",  # imports transformers
    "VLLMEngine": "nemo_flashrl.rollout.vllm_engine",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
