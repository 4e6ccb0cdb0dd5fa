"""The collecting rank's event loop: the trainer is synchronous, rollouts are not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from nemo_flashrl.records import Batch

if TYPE_CHECKING:
    from nemo_flashrl.rollout.collector import Collector
    from nemo_flashrl.rollout.engine import Engine


class RolloutDriver:
    """Owns the loop on which an engine and its collector live; global rank 0 alone has one.

    Episodes in flight rest between calls and go on with the next one.
    """

    def __init__(self, engine: Engine, collector: Collector) -> None:
        self.engine = engine
        self.collector = collector
        self._loop = asyncio.new_event_loop()

    def collect(self, policy_version: int) -> Batch:
        """The next batch; an engine's or the collector's exception comes out here.

        Raises:
            ValueError: every episode of the batch ended in an error of the environment: it is broken, not unlucky.
        """
        batch = self._loop.run_until_complete(self.collector.collect(policy_version))
        if all(t.end_reason == "environment_error" for t in batch.trajectories):
            error = batch.trajectories[0].info.get("error")
            raise ValueError(
                f"environment: all {len(batch.trajectories)} episodes of a batch failed; the first: {error}"
            )
        return batch

    def load_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Serve new weights; on an error the old ones go on serving."""
        self._loop.run_until_complete(self.engine.load_weights(stream, version))

    def close(self) -> None:
        """End episodes in flight and free the engine."""
        if self._loop.is_closed():
            return
        self._loop.run_until_complete(self.collector.close())
        self._loop.run_until_complete(self.engine.close())
        self._loop.close()
