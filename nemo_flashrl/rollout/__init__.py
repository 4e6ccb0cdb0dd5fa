"""Episodes: prompts -> trajectories -> batches. Imports no trainer.

Collector (collector.py) --> Player (player.py) --> run_episode (episode.py) --ids--> an Engine (engines/)
     |  PromptStream (prompts.py)                     |--text, by Codec (chat_tokens.py)--> Environment (environments/)
     +--> Batch (records.py)

With servers, players are in processes of their own: WorkerPool (worker_pool.py) --messages--> Worker (worker.py).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_flashrl.records import Sampling
    from nemo_flashrl.rollout.collector import Collector
    from nemo_flashrl.rollout.driver import RolloutDriver
    from nemo_flashrl.rollout.episode import Limits

__all__ = ["Collector", "Limits", "RolloutDriver", "Sampling"]

_HOMES = {
    "Collector": "nemo_flashrl.rollout.collector",
    "Limits": "nemo_flashrl.rollout.episode",
    "RolloutDriver": "nemo_flashrl.rollout.driver",
    "Sampling": "nemo_flashrl.records",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
