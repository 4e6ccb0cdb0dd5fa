"""The engine that a configuration asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_flashrl import rollout

if TYPE_CHECKING:
    from nemo_flashrl.config import RolloutConfig
    from nemo_flashrl.rollout.engine import Engine


def make_engine(settings: RolloutConfig, model_path: str, vocab_size: int) -> Engine:
    """Servers are first spoken to when something is asked of the engine."""
    if settings.engine == "transformers":
        return rollout.TransformersEngine(model_path)
    ways = {"file": rollout.VLLMEngine, "broadcast": rollout.BroadcastEngine, "adapter": rollout.AdapterEngine}
    vllm = ways[settings.weight_transfer]
    kind = {"vllm": vllm, "sglang": rollout.SGLangEngine}[settings.engine]
    return kind(settings.servers, vocab_size, weights_folder=settings.weights_folder, timeout=settings.server_timeout)
