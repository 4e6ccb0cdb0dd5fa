"""What does not enter a batch, by reason (`batch_metrics.DROPS`), and when there is so much of it that a run ends."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from nemo_flashrl.records import Trajectory
from nemo_flashrl.rollout.agent import PROMPT_TOO_LONG

_KIND_LENGTH, _MOST_KINDS = 100, 20  # characters of an error, digits aside, that make its kind; kinds that are reported
_FREE, _LONGEST_BACKOFF = 8, 2.0  # failures in a row before a slot backs off, and the longest backoff in seconds


def reason_to_drop(group: Sequence[Trajectory], oldest_version: int | None, *, replace_tied: bool) -> str | None:
    """Why a group may not be trained on, where nothing sampled before `oldest_version` is; None: it may."""
    if any(trajectory.end_reason == PROMPT_TOO_LONG for trajectory in group):
        return PROMPT_TOO_LONG
    if not all(trajectory.action_count for trajectory in group):
        return "empty"
    if oldest_version is not None and min(trajectory.oldest_version for trajectory in group) < oldest_version:
        return "too_old"
    if replace_tied and len(group) > 1 and len({trajectory.reward for trajectory in group}) == 1:
        return "tied"
    return None


def none_usable(dropped: Counter[str], last: Sequence[Trajectory]) -> ValueError:
    """The end of a run in which group after group is dropped, `last` the last of them."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common())
    error = next((t.info["error"] for t in last if "error" in t.info), None)
    return ValueError(
        f"{dropped.total()} trajectories in a row were dropped and none was usable ({reasons})"
        + (f"; the environment's last error: {error}" if error else "")
    )


class FirstErrors:
    """Tells on stderr of what dropped episodes failed with, each kind once: they are in no file of the run."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()

    def tell(self, group: Sequence[Trajectory]) -> None:
        """Of a group that was dropped."""
        for trajectory in group:
            error = str(trajectory.info.get("error", "")) if trajectory.end_reason == "environment_error" else ""
            kind = re.sub(r"[0-9]+", "", error)[:_KIND_LENGTH]
            if error and kind not in self._kinds and len(self._kinds) < _MOST_KINDS:
                self._kinds.add(kind)
                said = f"an episode of prompt {trajectory.prompt_index} failed and is dropped: {error}"
                print(f"rollouts: {said}; counted in dropped_empty", file=sys.stderr, flush=True)


class Failing:
    """Backoff before a rollout slot is reused after an episode that could not begin.

    One is a fault of its task. Many in a row are a service that is down: without backoff they would spend an epoch of
    prompts in the seconds until it is back.
    """

    def __init__(self) -> None:
        self._in_a_row = 0

    def backoff(self, ended: Trajectory) -> float:
        """Seconds, after `ended`."""
        never_began = ended.end_reason == "environment_error" and not ended.turns
        self._in_a_row = self._in_a_row + 1 if never_began else 0
        return min(_LONGEST_BACKOFF, 0.1 * 2.0 ** (self._in_a_row - _FREE)) if self._in_a_row > _FREE else 0.0


@dataclass
class LongPrompts:
    """Told of each prompt that leaves no room for an answer, so that `batching.on_too_long` holds for it too.

    A prompt cannot be truncated, since no answer would be left: "truncate" leaves it out, as "drop" does.
    """

    environment: str
    context_length: int
    context_margin: float
    on_too_long: str  # "error" | "truncate" | "drop"
    tasks: str = "task"  # "held-out task"
    warned: bool = False

    def __call__(self, task_index: int, tokens: int) -> None:
        """
        Raises:
            ValueError: with "error"; else the first one is reported on stderr.
        """
        what = self.what(task_index, tokens)
        if self.on_too_long == "error":
            raise ValueError(f"{what}: raise the length, shorten the prompt, or set batching.on_too_long=drop")
        if not self.warned:
            self.warned = True
            rest = "it is dropped, as others will be; counted in dropped_prompt_too_long"
            print(f"rollouts: {what}; {rest}", file=sys.stderr, flush=True)

    def what(self, task_index: int, tokens: int) -> str:
        """What is wrong with it, in words."""
        return (
            f"environment.name={self.environment!r}: the prompt of {self.tasks} {task_index} has {tokens} tokens and "
            f"leaves no room for an answer in model.context_length={self.context_length}, of which "
            f"batching.context_margin={self.context_margin:g} is reserved"
        )
