"""NeMo model classes whose last pipeline stage answers with per-token log-probs and a policy loss."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "FlashReinforceModel": "policy_model",
    "GRPOModel": "policy_model",
    "HeadSettings": "policy_head",
    "PolicyModel": "policy_model",
    "nemo_config": "families",
}

__all__ = ["FlashReinforceModel", "GRPOModel", "HeadSettings", "PolicyModel", "nemo_config"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
