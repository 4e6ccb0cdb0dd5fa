"""Groups of ended trajectories: who waits for siblings, what enters no batch, idle slots."""

from __future__ import annotations

import re
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nemo_flashrl.records import Trajectory
from nemo_flashrl.rollout.episode import PROMPT_TOO_LONG

Group = list[Trajectory]  # the trajectories of one prompt, in the order of their sample numbers
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


class Groups:
    """Whole groups, in order, and how many trajectories they hold.

    Their sizes divide each other, and the largest divides what is asked of `take`.
    """

    def __init__(self) -> None:
        self.count = 0  # trajectories
        self._groups: deque[Group] = deque()

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups)

    def append(self, group: Group) -> None:
        """Behind all others."""
        self._groups.append(group)
        self.count += len(group)

    def popleft(self) -> Group:
        """The first one, removed."""
        self.count -= len(self._groups[0])
        return self._groups.popleft()

    def move_before(self, others: Groups) -> None:
        """Hand all of them over, before all `others`."""
        others._groups.extendleft(reversed(self._groups))
        others.count += self.count
        self._groups, self.count = deque(), 0

    def take(self, count: int) -> list[Group]:
        """Remove groups of exactly `count` trajectories; there are at least as many.

        The first ones are taken: one is left only where, with it and those already taken, no others add up to `count`.
        Worked example, 16 of groups of 4, 16, 8 and 4: with the first one 12 are lacking, 16 are too many, and 8 and 4
        complete it; the 16 stay.
        """
        taken, left, sizes = [], deque(), Counter(map(len, self._groups))
        for group in self._groups:
            sizes[len(group)] -= 1
            if len(group) <= count and _add_up(sizes, count - len(group)):
                taken.append(group)
                count -= len(group)
            else:
                left.append(group)
        assert not count, f"{count} trajectories are lacking"
        self._groups, self.count = left, sum(map(len, left))
        return taken


def _add_up(sizes: Counter[int], count: int) -> bool:
    """Whether some of so many groups of each size hold exactly `count` trajectories; the sizes divide each other."""
    for size in sorted(sizes, reverse=True):
        count -= size * min(sizes[size], count // size)
    return not count


class SlotClock:
    """Adds up idle rollout slots over time, by whether the trainer waits for a batch at that moment or not.

    Worked example, 4 slots: the trainer asks for a batch and all are busy for 10 s, one for 2 s more (a straggler);
    then it trains for 6 s and all are idle. `rollout_seconds` is 12, idle are 3 x 2 + 4 x 6 slot-seconds:
    `rollout_idle_seconds` is 30 / 4 = 7.5, and `rollout_idle_seconds_during_training` 24 / 4 = 6.
    """

    def __init__(self, slots: int, now: float) -> None:
        self._slots = slots
        self._running = 0
        self._asked = False
        self._since = now
        self._idle = {True: 0.0, False: 0.0}  # slot-seconds, by whether a batch is asked for
        self._seconds = {True: 0.0, False: 0.0}

    def update(self, now: float, *, running: int, asked: bool) -> None:
        """So many episodes run from `now` on, and the trainer waits for a batch or does not."""
        seconds = now - self._since
        self._idle[self._asked] += (self._slots - self._running) * seconds
        self._seconds[self._asked] += seconds
        self._since, self._running, self._asked = now, running, asked

    def take(self) -> dict[str, float]:
        """Seconds up to the last update, which begin anew."""
        numbers = {
            "rollout_seconds": self._seconds[True],
            "rollout_idle_seconds_during_training": self._idle[False] / self._slots,
            "rollout_idle_seconds": sum(self._idle.values()) / self._slots,
            "between_batches_seconds": sum(self._seconds.values()),
        }
        self._idle, self._seconds = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
        return numbers


class Siblings:
    """Ended trajectories whose group is not complete yet, and how long they wait for it.

    Worked example: three rollouts of one prompt end at 2 s, 3 s and 10 s. Two of them wait, 8 s and 7 s, the last does
    not: `group_wait_seconds` is (8 + 7 + 0) / 3 = 5.
    """

    def __init__(self) -> None:
        self.count = 0  # trajectories that wait now
        self._ended: dict[int, dict[int, tuple[Trajectory, float]]] = {}  # prompt index -> sample -> with its time
        self._waits: list[float] = []  # seconds, of the trajectories of groups that were completed

    def add(self, trajectory: Trajectory, sample: int, group_size: int, now: float) -> Group | None:
        """Its group in the order of sample numbers where it is the last to end, else None."""
        group = self._ended.setdefault(trajectory.prompt_index, {})
        group[sample] = trajectory, now
        if len(group) < group_size:
            self.count += 1
            return None
        del self._ended[trajectory.prompt_index]
        self.count -= group_size - 1
        if group_size > 1:
            self._waits += [now - ended for _, ended in group.values()]
        return [group[sample][0] for sample in range(group_size)]

    def take(self) -> dict[str, float]:
        """Mean over the trajectories of groups completed since the last call; empty where there was no group."""
        waits, self._waits = self._waits, []
        return {"group_wait_seconds": sum(waits) / len(waits)} if waits else {}
