"""Sums of a step and its trajectories -> the numbers that `metrics.jsonl` holds.

`table.py` says what each name means and how it is reduced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from nemo_flashrl.metrics.repetition import distinct_answers, repeated_token_share, unique_sample_share
from nemo_flashrl.metrics.table import TABLE
from nemo_flashrl.records import Trajectory

HISTOGRAM_BINS = 16


def policy_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """What the table makes of an algorithm's sums over the step; maxima and names it does not know pass through.

    A mean over nothing is left out: of a step without an action token in the loss nobody was rejected.

    >>> policy_metrics({"loss": 0.5, "rows": 4.0, "admitted": 3.0})
    {'loss': 0.5, 'gate_acceptance': 0.75}
    """
    out, used = {}, {"rows", "admitted_tokens"}
    for metric in TABLE:
        if metric.numerator not in sums:
            continue
        divisor = next((sums[name] for name in metric.denominators if name in sums), 1.0)
        if divisor:
            out[metric.name] = sums[metric.numerator] / divisor
        used.add(metric.numerator)
    return out | {name: value for name, value in sums.items() if name not in used}


def trajectory_metrics(trajectories: Sequence[Trajectory], policy_version: int) -> dict[str, float | dict]:
    """Reward, success, lengths, repetition, age of one batch, for a policy of `policy_version` that trains on it."""
    ages = [policy_version - t.oldest_version for t in trajectories]
    rewards = np.array([t.reward for t in trajectories], dtype=np.float64)
    lengths = np.array([len(t.token_ids) for t in trajectories])
    actions = np.array([t.action_count for t in trajectories])
    lowest, highest = float(rewards.min()), float(rewards.max())
    counts, edges = np.histogram(rewards, bins=HISTOGRAM_BINS if lowest < highest else [lowest, highest])
    repeated = sum(repeated_token_share(t) * count for t, count in zip(trajectories, actions, strict=True))
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "reward_histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
        "success": float(np.mean([not t.failed for t in trajectories])),
        "staleness_mean": float(np.mean(ages)),
        "staleness_max": float(max(ages)),
        "turns": float(np.mean([t.turns for t in trajectories])),
        "trajectory_tokens": float(lengths.mean()),
        "response_tokens": float(actions.mean()),
        "response_tokens_max": float(actions.max()),
        "action_token_share": float(actions.sum() / lengths.sum()),
        "repeated_token_share": float(repeated / max(actions.sum(), 1)),
        "distinct_answers": float(distinct_answers(trajectories)),
        "sampled_entropy": _sampled_entropy(trajectories),
    }


def _sampled_entropy(trajectories: Sequence[Trajectory]) -> float:
    """-log p of the sampled tokens, mean: unbiased for the sampler's mean entropy, and there without computing one."""
    total = sum(float(t.behavior_logprobs[t.action_mask].sum(dtype=np.float64)) for t in trajectories)
    return -total / max(sum(t.action_count for t in trajectories), 1)


def group_metrics(trajectories: Sequence[Trajectory], advantages: Sequence[float]) -> dict[str, float]:
    """How groups of two or more differ inside; empty where every prompt has one rollout.

    `advantages` [B] may hold NaN for a trajectory that was left out; its group's deviation is of the others.
    """
    members: dict[int, list[int]] = {}
    for place, trajectory in enumerate(trajectories):
        members.setdefault(trajectory.group, []).append(place)
    groups = [places for places in members.values() if len(places) > 1]
    if not groups:
        return {}
    rewards = [np.array([trajectories[i].reward for i in places]) for places in groups]
    inside = [np.array([advantages[i] for i in places]) for places in groups]
    deviations = [float(a[np.isfinite(a)].std()) for a in inside if np.isfinite(a).any()]
    return {
        "group_reward_std": float(np.mean([r.std() for r in rewards])),
        "group_advantage_std": float(np.mean(deviations)) if deviations else 0.0,
        "tied_groups": float(np.mean([r.min() == r.max() for r in rewards])),
        "unique_sample_share": float(np.mean([unique_sample_share([trajectories[i] for i in p]) for p in groups])),
        "group_distinct_answers": float(np.mean([distinct_answers([trajectories[i] for i in p]) for p in groups])),
        "group_size": float(np.mean([len(places) for places in groups])),
    }
