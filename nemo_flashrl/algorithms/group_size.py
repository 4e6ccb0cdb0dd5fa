"""How many rollouts a prompt gets, moved by how much the rewards inside a group differ.

Every `every` steps the mean over these steps of the groups' reward standard deviation is compared with the threshold:
above it G goes one size up, below it one size down. A batch keeps its number of trajectories, so the sampling budget of
a step stays what it was and the number of prompts changes.
"""

from __future__ import annotations

SIZES = (4, 8, 16, 32)


class GroupSize:
    """The group size of the step, in `value`.

    >>> size = GroupSize(8, every=2, threshold=0.3, batch_size=64)
    >>> [size.after_step(std) or size.value for std in (0.4, 0.4, 0.1, 0.1, 0.1, 0.1)]
    [8, 16, 16, 8, 8, 4]

    Args:
        start: of the first steps; one of 4, 8, 16, 32.
        every: optimizer steps between two decisions.
        threshold: of the mean standard deviation of rewards inside a group (divided by G).
        batch_size: trajectories of a step; sizes that do not divide it are not used.

    Raises:
        ValueError: a start that is no such size.
    """

    def __init__(self, start: int, *, every: int, threshold: float, batch_size: int) -> None:
        self.sizes = [size for size in SIZES if batch_size % size == 0]
        if start not in self.sizes:
            raise ValueError(
                f"algorithm.settings.group_size={start}: with group_size.every={every} and "
                f"rollout.batch_size={batch_size} it must be one of {self.sizes or 'none; change rollout.batch_size'}"
            )
        self.value, self.every, self.threshold = start, every, threshold
        self._deviations: list[float] = []  # since the last decision

    def after_step(self, reward_std: float) -> None:
        """Move on by one step whose groups' rewards had this mean standard deviation."""
        self._deviations.append(reward_std)
        if len(self._deviations) < self.every:
            return
        mean, place = sum(self._deviations) / self.every, self.sizes.index(self.value)
        place += (mean > self.threshold) - (mean < self.threshold)
        self.value = self.sizes[min(max(place, 0), len(self.sizes) - 1)]
        self._deviations = []

    def state_dict(self) -> dict[str, object]:
        """What a checkpoint keeps."""
        return {"value": self.value, "deviations": list(self._deviations)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore that state; a size that no longer fits the batch is left at the start's."""
        if state["value"] in self.sizes:
            self.value = int(state["value"])
        self._deviations = list(state["deviations"])[-(self.every - 1) :] if self.every > 1 else []
