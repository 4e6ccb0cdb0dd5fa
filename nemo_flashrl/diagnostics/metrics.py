"""Sums of a step and its trajectories -> the numbers that `metrics.jsonl` holds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nemo_flashrl.records import Trajectory


def is_time(name: str) -> bool:
    """Whether a metric is a reading of the clock: what two runs of one seed may differ in."""
    return name.endswith(("_seconds", "_per_second"))


def policy_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Means of what an algorithm reported as sums over the step; maxima pass through."""
    rows = max(sums.get("rows", 0.0), 1.0)
    tokens = max(sums.get("policy_tokens", 0.0), 1.0)
    out = {"loss": sums["loss"], "policy_tokens": sums.get("policy_tokens", 0.0)}
    if "admitted" in sums:
        out["gate_acceptance"] = sums["admitted"] / rows
        out["sequence_kl"] = sums["sequence_kl"] / rows
        out["dropped_ratio_guard"] = sums["guarded"]
        out["retained_tokens"] = sums["retained_tokens"]
        out["extreme_tokens"] = sums["extreme_tokens"]
        out["ratio_mean"] = sums["ratio"] / max(sums.get("admitted_tokens", sums["policy_tokens"]), 1.0)
    else:
        out["ratio_mean"] = sums["ratio"] / tokens
    if "clipped_tokens" in sums:
        out["clip_fraction"] = sums["clipped_tokens"] / tokens
    if "logprob_difference" in sums:
        out["logprob_difference"] = sums["logprob_difference"] / tokens
    out.update({name: value for name, value in sums.items() if name.endswith("_max")})
    return out


def trajectory_metrics(trajectories: Sequence[Trajectory], policy_version: int) -> dict[str, float]:
    """Reward, success, lengths, turns and age of one batch, for a policy of `policy_version` that trains on it."""
    ages = [policy_version - t.oldest_version for t in trajectories]
    rewards = np.array([t.reward for t in trajectories], dtype=np.float64)
    lengths = np.array([len(t.token_ids) for t in trajectories])
    actions = np.array([t.action_count for t in trajectories])
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "success": float(np.mean([not t.failed for t in trajectories])),
        "staleness_mean": float(np.mean(ages)),
        "staleness_max": float(max(ages)),
        "turns": float(np.mean([t.turns for t in trajectories])),
        "trajectory_tokens": float(lengths.mean()),
        "response_tokens": float(actions.mean()),
        "action_token_share": float(actions.sum() / lengths.sum()),
    }


def append_json_line(path: Path, record: Mapping[str, Any]) -> None:
    """One object a line, readable while the run goes on; what JSON cannot hold becomes null (NaN, inf) or text."""
    with path.open("a") as file:
        file.write(json.dumps(_finite(record), allow_nan=False, default=str) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps of a `metrics.jsonl`."""
    return [json.loads(line) for line in path.read_text().splitlines()]
