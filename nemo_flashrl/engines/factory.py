"""The engine that a configuration asks for: the one place that names them all, and says what one is wrapped in."""

from __future__ import annotations

import json
import urllib.request
from typing import TYPE_CHECKING

from nemo_flashrl import engines
from nemo_flashrl.engines.base import DrainingEngine, Engine

if TYPE_CHECKING:
    from nemo_flashrl.config import RolloutConfig

VERSION_ROUTES = {"vllm": "/version", "sglang": "/get_server_info"}


def make_engine(settings: RolloutConfig, model_path: str, vocab_size: int, context: int) -> Engine:
    """`context` is what an episode may come to, in tokens. Servers are first spoken to when something is asked."""
    engine = _sampler(settings, model_path, vocab_size, context)
    return DrainingEngine(engine) if settings.mode == "async" else engine


def _sampler(settings: RolloutConfig, model_path: str, vocab_size: int, context: int) -> Engine:
    if settings.engine == "transformers":
        return engines.TransformersEngine(model_path)
    ways = {"file": engines.VLLMEngine, "broadcast": engines.BroadcastEngine, "adapter": engines.AdapterEngine}
    kind = {"vllm": ways[settings.weight_transfer], "sglang": engines.SGLangEngine}[settings.engine]
    folder, timeout = settings.weights_folder, settings.server_timeout
    return kind(settings.servers, vocab_size, weights_folder=folder, timeout=timeout, context=context)


def server_versions(settings: RolloutConfig) -> dict[str, str]:
    """What each rollout server says of its own version; one that does not answer within 5 s is left out.

    >>> server_versions(RolloutConfig(engine="vllm", servers=["http://host:8000"]))  # doctest: +SKIP
    {'vllm of http://host:8000': '0.11.0'}
    """
    found = {}
    for url in settings.servers if settings.engine in VERSION_ROUTES else ():
        try:
            with urllib.request.urlopen(url.rstrip("/") + VERSION_ROUTES[settings.engine], timeout=5) as answer:
                found[f"{settings.engine} of {url}"] = str(json.load(answer)["version"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found
