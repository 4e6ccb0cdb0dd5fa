"""What a run watches about itself: each number against its limit, and when it has been beyond it for long enough.

Limits are off by default (`monitors` of the configuration). History is that of `metrics.jsonl`, which a run that goes
on from a checkpoint reads back, so a stop comes at the same step with and without an interruption.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

WINDOW = 10  # steps whose median is what a jump or a spike is measured against, and that make a trend
FEWEST = 5  # of them before there is a measure
FEW_UNIQUE = 0.6

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rule:
    """One limit."""

    field: str  # of MonitorsConfig
    metric: str
    highest: bool  # the limit is the most that is allowed; else the least
    change: str  # what to do about it


RULES = (
    Rule("advantage_jump", "advantage_jump", True, "keep the reward scale; change one setting at a time"),
    Rule("unique_samples", "unique_sample_share", False, "rollout.temperature up, or fewer rollouts a prompt"),
    Rule(
        "distinct_answers",
        "group_distinct_answers",
        False,
        "rollout.temperature up, or a task with more distinct answers",
    ),
    Rule(
        "effective_fraction", "effective_fraction", False, "tasks of medium difficulty (a curriculum), or larger groups"
    ),
    Rule("entropy", "sampled_entropy", False, "optimizer.learning_rate down, a KL term, rollout.temperature up"),
    Rule("length_trend", "length_trend", True, "length_penalty.coefficient above 0, rollout.max_tokens_per_turn down"),
    Rule("repeated_tokens", "repeated_token_share", True, "length_penalty.unit=new_tokens, a KL term"),
    Rule("loss_spike", "loss_spike", True, "advantage.clip=3, optimizer.learning_rate down"),
    Rule("success_drop", "success_drop", True, "an earlier checkpoint; optimizer.learning_rate down, a KL term"),
    Rule("reward_drop", "reward_drop", True, "an earlier checkpoint; optimizer.learning_rate down, a KL term"),
)


class Monitors:
    """Sees each step's metrics.

    Args:
        limits: field of `MonitorsConfig` -> its value, and `patience`.
    """

    def __init__(self, limits: Mapping[str, Any]) -> None:
        self._limits = {name: limit for name, limit in limits.items() if limit is not None}
        self.reason = ""  # why the run is to end
        self._beyond = dict.fromkeys((rule.field for rule in RULES), 0)  # steps in a row
        kept = ("spread", "loss", "length", "success", "reward_mean")
        self._recent: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in kept}
        self._best: dict[str, float] = {}  # mean over WINDOW steps
        self._first_lengths: list[float] = []
        self._warned = False

    def replay(self, steps: Iterable[Mapping[str, Any]]) -> None:
        """Take in the steps of a resumed run that are done; they stop nothing."""
        for record in steps:
            self.see(record)
        self.reason = ""

    def see(self, record: Mapping[str, Any]) -> dict[str, float]:
        """A step's metrics -> what the earlier ones make of them; sets `reason` when a limit is reached."""
        measured = self._against_history(record)
        seen = {**record, **measured}
        for rule in RULES:
            value, limit = seen.get(rule.metric, math.nan), self._limits.get(rule.field)
            if limit is None or value is None or math.isnan(value):
                continue
            beyond = value > limit if rule.highest else value < limit
            self._beyond[rule.field] = self._beyond[rule.field] + 1 if beyond else 0
            if self._beyond[rule.field] >= self._limits["patience"] and not self.reason:
                word = "above" if rule.highest else "below"
                self.reason = (
                    f"{rule.metric}={value:.3g} is {word} monitors.{rule.field}={limit:g} for "
                    f"{self._beyond[rule.field]} consecutive steps, up to step {record['step']}; change: {rule.change}"
                )
        self._warn(record)
        return measured

    def _against_history(self, record: Mapping[str, Any]) -> dict[str, float]:
        spread = "group_advantage_std" if "group_advantage_std" in record else "advantage_std"
        measured = {}
        for name, metric, multiple in (("spread", spread, "advantage_jump"), ("loss", "loss", "loss_spike")):
            if metric in record and (times := self._multiple(name, record[metric])) is not None:
                measured[multiple] = times
        length = record.get("response_tokens")
        if length is not None and math.isfinite(length):
            if len(self._first_lengths) < WINDOW:
                self._first_lengths.append(length)
            self._recent["length"].append(length)
            measured["length_trend"] = _ratio(statistics.fmean(self._recent["length"]), self._first_lengths)
        for name, drop in (("success", "success_drop"), ("reward_mean", "reward_drop")):
            value, recent = record.get(name), self._recent[name]
            if value is not None and math.isfinite(value):
                recent.append(value)
            if len(recent) == WINDOW:
                mean = statistics.fmean(recent)
                self._best[name] = max(self._best.get(name, mean), mean)
                measured[drop] = self._best[name] - mean
        return measured

    def _multiple(self, name: str, value: float | None) -> float | None:
        """|value| over the median of those before it; None where too few are known. What is no number is infinite."""
        size = math.inf if value is None or not math.isfinite(value) else abs(value)
        before = self._recent[name]
        multiple = None
        if len(before) >= FEWEST and (usual := statistics.median(before)) > 0:
            multiple = size / usual
        if math.isfinite(size):
            before.append(size)
        return multiple

    def _warn(self, record: Mapping[str, Any]) -> None:
        share = record.get("unique_sample_share", 1.0)
        if share is None or share >= FEW_UNIQUE or self._warned:
            return
        self._warned = True
        logger.warning(
            "step %d: %.0f%% of a group's samples are unique (under %.0f%%): rollouts of a prompt are near copies; "
            "rollout.temperature up, or fewer rollouts a prompt",
            record["step"],
            100 * share,
            100 * FEW_UNIQUE,
        )


def _ratio(value: float, first: list[float]) -> float:
    """To the mean of the first steps; 1 where they sampled nothing."""
    usual = statistics.fmean(first)
    return value / usual if usual > 0 else 1.0
