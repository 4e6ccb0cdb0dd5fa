"""Samplers: token ids -> tokens with their log-probs and policy versions. Imports no trainer.

base.py            the protocol, and the wrapper that lets requests finish before weights change
factory.py         which engine a configuration asks for, and what it is wrapped in
http.py            requests to servers, whichever they are; what their log-probs are of
http_refit.py      the same, and new weights for them
server_pool.py     which servers are up, who gets the next request
http_connection.py how a generation gets there and back
vllm.py            vLLM's routes; weights by folder, or a LoRA adapter alone
vllm_broadcast.py  vLLM's routes; weights over the network
sglang.py          SGLang's routes
transformers.py    in the trainer's process
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nemo_flashrl.engines.base import Engine

if TYPE_CHECKING:
    from nemo_flashrl.engines.sglang import SGLangEngine
    from nemo_flashrl.engines.transformers import TransformersEngine
    from nemo_flashrl.engines.vllm import AdapterEngine, VLLMEngine
    from nemo_flashrl.engines.vllm_broadcast import BroadcastEngine

__all__ = [
    "AdapterEngine",
    "BroadcastEngine",
    "Engine",
    "SGLangEngine",
    "TransformersEngine",
    "VLLMEngine",
]

_HOMES = {
    "AdapterEngine": "vllm",
    "BroadcastEngine": "vllm_broadcast",
    "SGLangEngine": "sglang",
    "TransformersEngine": "transformers",
    "VLLMEngine": "vllm",
}  # read on first use: some need packages that not every environment has


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
