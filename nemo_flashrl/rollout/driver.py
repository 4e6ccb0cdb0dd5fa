"""The collecting rank's event loop: the trainer is synchronous, rollouts are not."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nemo_flashrl.records import Batch

if TYPE_CHECKING:
    from nemo_flashrl.rollout.collector import Collector
    from nemo_flashrl.rollout.engine import Engine


class RolloutDriver:
    """Owns the loop on which an engine and its collector live; global rank 0 alone has one.

    Episodes in flight rest between calls and go on with the next one.

    Args:
        engine: samples.
        collector: makes batches with it.
        lag: batches collected ahead of the one in training; 0 trains on what was just sampled.
    """

    def __init__(self, engine: Engine, collector: Collector, *, lag: int = 0) -> None:
        self.engine = engine
        self.collector = collector
        self._lag = lag
        self._ahead: deque[Batch] = deque()
        self._in_training: Batch | None = None
        self._loop = asyncio.new_event_loop()

    def collect(self, policy_version: int) -> Batch:
        """The next batch to train on; an engine's or the collector's exception comes out here.

        Raises:
            ValueError: every episode of the batch ended in an error of the environment: it is broken, not unlucky.
        """
        while len(self._ahead) <= self._lag:
            batch = self._loop.run_until_complete(self.collector.collect(policy_version))
            if all(t.end_reason == "environment_error" for t in batch.trajectories):
                error = batch.trajectories[0].info.get("error")
                raise ValueError(
                    f"environment: all {len(batch.trajectories)} episodes of a batch failed; the first: {error}"
                )
            self._ahead.append(batch)
        self._in_training = self._ahead.popleft()
        return self._in_training

    def trained(self) -> None:
        """The optimizer step on the batch that `collect` returned last is done: its prompts are finished for good."""
        assert self._in_training is not None, "no batch is in training"
        self.collector.trained(self._in_training)
        self._in_training = None

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, plain numbers, strings and lists; may be taken at any time.

        It belongs to the weights of the last step that was reported by `trained`. Prompts of episodes in flight, of
        batches collected ahead and of a batch still in training are `unfinished`: they are sampled anew after a resume.
        """
        return self.collector.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, before the first `collect`.

        Raises:
            ValueError: it belongs to another number of tasks or another seed.
        """
        self.collector.load_state_dict(state)

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
