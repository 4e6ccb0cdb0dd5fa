"""Who waits for whom: how long rollout slots are idle, and because of whom."""

from __future__ import annotations

from nemo_flashrl.records import Trajectory


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

    def add(self, trajectory: Trajectory, sample: int, group_size: int, now: float) -> list[Trajectory] | None:
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
