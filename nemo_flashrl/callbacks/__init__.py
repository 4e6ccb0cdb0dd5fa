"""Lightning callbacks: what happens around an optimizer step."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "EMAReferenceCallback": "reference",
    "EvaluationCallback": "evaluation",
    "KLPenaltyCallback": "kl_penalty",
    "PassAgreementCallback": "kl_penalty",
    "RLMetricsCallback": "metrics",
    "RunCheckpoint": "checkpoint",
    "ValueBaselineCallback": "value_baseline",
    "WeightRefitCallback": "weight_refit",
}

# The others are made by `train` from a configuration.
__all__ = ["EMAReferenceCallback", "RLMetricsCallback", "WeightRefitCallback"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
