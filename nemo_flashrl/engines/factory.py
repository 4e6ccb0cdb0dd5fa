"""The engine that a configuration asks for: the one place that names them all, and says what one is wrapped in."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from nemo_flashrl import engines
from nemo_flashrl.engines.base import DrainingEngine, Engine
from nemo_flashrl.engines.http import RemoteSampler
from nemo_flashrl.engines.http_refit import RemoteEngine
from nemo_flashrl.engines.server_pool import Server

if TYPE_CHECKING:
    from nemo_flashrl.config import RolloutConfig

VERSION_ROUTES = {"vllm": "/version", "sglang": "/get_server_info"}


def make_engine(settings: RolloutConfig, model_path: str, vocab_size: int, context: int) -> Engine:
    """`context` is what an episode may come to, in tokens. Servers are first spoken to when something is asked."""
    here = settings.engine == "transformers"
    engine = engines.TransformersEngine(model_path) if here else make_remote(settings, vocab_size, context)
    return DrainingEngine(engine) if settings.mode == "async" else engine


def make_remote(settings: RolloutConfig, vocab_size: int, context: int) -> RemoteEngine:
    """The engine over servers; it waits for no request in flight before weights are loaded."""
    folder, timeout = settings.weights_folder, settings.server_timeout
    kind = _kind(settings)
    return kind(settings.servers, vocab_size, weights_folder=folder, timeout=timeout, context=context)


def make_sampler(settings: RolloutConfig, vocab_size: int, adopt: Callable[[Server], Awaitable[None]]) -> RemoteSampler:
    """What a rollout worker samples with: the same servers, which another process loads weights into and tells of."""
    options = {"adopt": adopt, "timeout": settings.server_timeout, "tell": lambda _: None}
    return RemoteSampler(_kind(settings).dialect(), settings.servers, vocab_size, **options)


def _kind(settings: RolloutConfig) -> type[RemoteEngine]:
    ways = {"file": engines.VLLMEngine, "broadcast": engines.BroadcastEngine, "adapter": engines.AdapterEngine}
    return {"vllm": ways[settings.weight_transfer], "sglang": engines.SGLangEngine}[settings.engine]


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
