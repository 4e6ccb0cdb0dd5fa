"""Numbers of rollouts: of a batch, where `metrics/table.py` says what each name means, and of held-out tasks."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence

from nemo_flashrl.records import Trajectory
from nemo_flashrl.rollout.curriculum import NAMED_CLASSES
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


def environment_errors(trajectories: Sequence[Trajectory]) -> int:
    """Number of episodes that a fault of the environment ended."""
    return sum(t.end_reason == "environment_error" for t in trajectories)


def success_rate(trajectories: Sequence[Trajectory]) -> float:
    """Share of episodes that the environment calls solved."""
    return sum(not t.failed for t in trajectories) / len(trajectories)


def success_by_class(trajectories: Sequence[Trajectory], classes: Sequence[str]) -> dict[str, float]:
    """`success_rate` of each class's episodes; `classes` are those of the tasks that `prompt_index` counts.

    Empty without classes, or with more of them than metrics name.
    """
    if not 0 < len(set(classes)) <= NAMED_CLASSES:
        return {}
    played: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        played.setdefault(classes[trajectory.prompt_index], []).append(trajectory)
    return {name: success_rate(played[name]) for name in sorted(played)}


def pass_at_k(trajectories: Sequence[Trajectory], k: int) -> float:
    """How likely one of k samples of a task solves it, mean over tasks.

    Raises:
        ValueError: a task has fewer than k samples.
    """
    counts = Counter(t.prompt_index for t in trajectories)
    solved = Counter(t.prompt_index for t in trajectories if not t.failed)
    return unbiased_pass_at_k([(n, solved[task]) for task, n in counts.items()], k)


def unbiased_pass_at_k(tasks: Sequence[tuple[int, int]], k: int) -> float:
    """Mean over tasks of 1 - C(n - c, k) / C(n, k), from (n samples, c of them solved) of each.

    Unbiased (Chen et al. 2021), where 1 - (1 - c / n)^k is not; with k = 1 it is the mean success of a task.

    >>> unbiased_pass_at_k([(4, 1), (4, 3)], 2)  # 1 - 3/6 and 1 - 0
    0.75

    Raises:
        ValueError: a task has fewer than k samples.
    """
    fewest = min((n for n, _ in tasks), default=0)
    if not 1 <= k <= fewest:
        raise ValueError(f"k={k}: must be from 1 to the {fewest} samples of a task")
    missed = [math.comb(n - c, k) / math.comb(n, k) for n, c in tasks]
    return 1 - sum(missed) / len(missed)
