"""What a batch tells about the rollouts that made it; `metrics/table.py` says what each name means."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from nemo_flashrl.records import Trajectory
from nemo_flashrl.rollout.episode import PROMPT_TOO_LONG

OF_ACTIONS = ("actions_truncated", "actions_with_chat_tokens")  # counted in an episode's info
AGES = (("0", 0, 0), ("1", 1, 1), ("2_3", 2, 3), ("4_7", 4, 7), ("8_up", 8, None))  # policy versions
LOSSES = ("servers_lost", "workers_lost", "episodes_restarted")
DROPS = ("too_old", "empty", "tied", PROMPT_TOO_LONG)
ENDS = ("done", "turn_limit", "token_limit", "environment_error")  # always there; others when they occur


def rollout_metrics(
    trajectories: Sequence[Trajectory], policy_version: int, dropped: Counter[str], ends: Counter[str]
) -> dict[str, float]:
    """Numbers of one batch that is trained at `policy_version`; `episodes_*` count the dropped ones too."""
    actions, turns = sum(t.action_count for t in trajectories), sum(t.turns for t in trajectories)
    return {
        **_temperature(trajectories),
        "turns": turns / len(trajectories),
        "action_token_share": actions / sum(len(t.token_ids) for t in trajectories),
        "observations_truncated": float(sum(t.info.get("observations_truncated", 0) for t in trajectories)),
        **{name: sum(t.info.get(name, 0) for t in trajectories) / turns for name in OF_ACTIONS},
        **staleness_metrics(trajectories, policy_version),
        **{f"dropped_{reason}": float(dropped[reason]) for reason in DROPS},
        **{f"episodes_{reason}": float(ends[reason]) for reason in sorted({*ENDS, *ends})},
    }


def _temperature(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    known = [t.temperature for t in trajectories if t.temperature is not None]
    return {"temperature": statistics.fmean(known)} if known else {}


def staleness_metrics(trajectories: Sequence[Trajectory], policy_version: int) -> dict[str, float]:
    """Age of a trajectory's oldest token in policy versions: mean, maximum, and shares by age, which add up to 1."""
    ages = [policy_version - t.oldest_version for t in trajectories]
    metrics = {"staleness_mean": sum(ages) / len(ages), "staleness_max": float(max(ages))}
    for name, lowest, highest in AGES:
        count = sum(lowest <= age and (highest is None or age <= highest) for age in ages)
        metrics[f"staleness_{name}"] = count / len(ages)
    return metrics


def fault_metrics(faults: Counter[str]) -> dict[str, float]:
    """Of what an engine has counted in one step: `LOSSES`, and repeated requests, in all and by reason."""
    tries = Counter(faults)
    losses = {name: float(tries.pop(name, 0)) for name in LOSSES}
    by_reason = {f"rollout_faults_{reason}": float(count) for reason, count in sorted(tries.items())}
    return {**losses, "rollout_faults": float(tries.total()), **by_reason}
