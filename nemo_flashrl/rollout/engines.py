"""The engine that a configuration asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_flashrl import rollout

if TYPE_CHECKING:
    from nemo_flashrl.config import RolloutConfig
    from nemo_flashrl.rollout.engine import Engine


def make_engine(settings: RolloutConfig, model_path: str, vocab_size: int, context: int) -> Engine:
    """`context` is what an episode may come to, in tokens. Servers are first spoken to when something is asked."""
    if settings.engine == "transformers":
        return rollout.TransformersEngine(model_path)
    ways = {"file": rollout.VLLMEngine, "broadcast": rollout.BroadcastEngine, "adapter": rollout.AdapterEngine}
    vllm = ways[settings.weight_transfer]
    kind = {"vllm": vllm, "sglang": rollout.SGLangEngine}[settings.engine]
    folder, timeout = settings.weights_folder, settings.server_timeout
    return kind(settings.servers, vocab_size, weights_folder=folder, timeout=timeout, context=context)
