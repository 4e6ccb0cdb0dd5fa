"""The collecting rank's event loop, in a thread of its own: rollouts run on while the trainer trains.

    trainer's thread                              the loop's thread
    collect(version)   --- waits for ---------->  Collector.collect, episodes, time-outs
    (optimizer step)                              streaming episodes run on
    trained()          ------------------------>  prompts are finished
    load_weights()     -- one tensor at a time ->  Engine.load_weights

What fails there, whenever it does, comes out of the trainer's next call.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from nemo_flashrl.records import Batch
from nemo_flashrl.rollout.collector import CollectionStopped, Collector
from nemo_flashrl.rollout.metrics import fault_metrics, rollout_metrics, staleness_metrics

if TYPE_CHECKING:
    from nemo_flashrl.engines.base import Engine
from collections.abc import Iterator
from queue import SimpleQueue

from nemo_flashrl.weight_sync.probe import Probe

T = TypeVar("T")
Named = tuple[str, Tensor]
CLOSE_SECONDS = 5.0  # for the environments of the episodes in flight, and as long for the engine
STOP_SECONDS = 5.0  # for what runs on the loop to end by itself, once the run was asked to stop
_LOOK_SECONDS = 0.5  # between two looks whether that was asked: a signal handler may take no lock to say so


class RolloutDriver:
    """Owns the loop on which an engine and its collector live; global rank 0 alone has one.

    Args:
        engine: samples.
        collector: makes batches with it.
        lag: batches collected ahead of the one in training, with the weights of that moment; for a collector that does
            not stream. 0 trains on what was just sampled.
        updates_per_batch: optimizer steps on each batch. From the second on it is older than the policy, as its
            staleness says.
    """

    def __init__(self, engine: Engine, collector: Collector, *, lag: int = 0, updates_per_batch: int = 1) -> None:
        self.engine = engine
        self.collector = collector
        self._lag, self._updates_per_batch = lag, updates_per_batch
        self._updates_done = 0  # optimizer steps done on the batch in training
        self._ahead: deque[Batch] = deque()
        self._in_training: Batch | None = None
        self._reported: Counter[str] = Counter()  # faults of the engine that `faults` has returned
        self._loop = asyncio.new_event_loop()
        self._handover = Handover()  # the last one
        self._broken: Future[None] = Future()  # done when something there tried to end the process
        self._broken.add_done_callback(lambda _: self._handover.stop())
        self._closed = self._held = False  # held: something keeps the loop's thread for itself
        self._asked_to_stop: float | None = None  # when, on the monotonic clock
        self._stoppable: Future[Any] = Future()  # the last of those that a stop ends
        self._state = collector.state_dict()  # of the last finished batch, for when the loop cannot be asked
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self._thread.start()

    def __deepcopy__(self, memo: dict[int, Any]) -> RolloutDriver:
        """Itself: it owns a thread. NeMo's trainer copies its callbacks to keep a record of its arguments."""
        return self

    def collect(self, policy_version: int) -> Batch:
        """The next batch for a trainer that is at `policy_version`.

        Raises:
            ValueError: every episode of the batch ended in an error of the environment: it is broken, not unlucky.
            Whatever an engine, an episode or the collector raised since the last call.
        """
        if self._in_training is not None and self._updates_done:
            return self._handed_over(self._in_training, policy_version, again=True)
        while len(self._ahead) <= self._lag:
            batch = self._collected(self._begin(self.collector.collect(policy_version)))
            if all(t.end_reason == "environment_error" for t in batch.trajectories):
                error = batch.trajectories[0].info.get("error")
                raise ValueError(
                    f"environment: all {len(batch.trajectories)} episodes of a batch failed; the first: {error}"
                )
            self._ahead.append(batch)
        self._updates_done = 0
        return self._handed_over(self._ahead.popleft(), policy_version)

    def _collected(self, collecting: Future[Batch]) -> Batch:
        """The batch; CollectionStopped also where the loop's thread is blocked and cannot raise it."""
        while not wait({collecting, self._broken}, timeout=_LOOK_SECONDS, return_when=FIRST_COMPLETED).done:
            asked = self._asked_to_stop
            if asked is not None and time.monotonic() - asked > STOP_SECONDS:
                self._held = True
                raise CollectionStopped
        return self._result(collecting)

    def _handed_over(self, batch: Batch, policy_version: int, again: bool = False) -> Batch:
        if again:  # its drops and ends were counted the first time
            news = rollout_metrics(batch.trajectories, policy_version, Counter(), Counter())
            counted = {name for name in batch.metrics if name.startswith(("dropped_", "episodes_"))}
            metrics = {name: value for name, value in batch.metrics.items() if name not in counted} | news
            batch = replace(batch, policy_version=policy_version, metrics=metrics)
        elif batch.policy_version != policy_version:  # it has aged
            ages = staleness_metrics(batch.trajectories, policy_version)
            batch = replace(batch, policy_version=policy_version, metrics=batch.metrics | ages)
        self._in_training = batch
        return batch

    def use(self, play: Callable[[Engine], Coroutine[Any, Any, T]]) -> T | None:
        """What `play` answers, run on the loop with the engine, beside whatever else is in flight; None if stopped."""
        with contextlib.suppress(CancelledError):
            return self._result(self._begin_stoppable(play(self.engine)))

    def faults(self) -> dict[str, float]:
        """Metrics of faults in the engine since the last call that were recovered from."""
        return self._call(_soon(self._new_faults))

    def _new_faults(self) -> dict[str, float]:
        before, self._reported = self._reported, Counter(self.engine.faults)
        return fault_metrics(self._reported - before)

    def stop_collecting(self) -> None:
        """Let `collect` raise CollectionStopped, from now on; may be called in a signal handler.

        At once, or after `STOP_SECONDS` where an environment blocks the loop's thread. `use` and `load_weights` end by
        then as well: the run ends with this step, and servers that are gone with the job would be waited for.
        """
        self._asked_to_stop = self._asked_to_stop or time.monotonic()
        if not self._closed:
            self._loop.call_soon_threadsafe(self.collector.stop)
            self._stop_soon()

    def _begin_stoppable(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        future = self._stoppable = self._begin(coroutine)
        if self._asked_to_stop is not None:
            self._stop_soon()
        return future

    def _stop_soon(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.call_later, STOP_SECONDS, lambda: self._stoppable.cancel())

    def trained(self) -> None:
        """The step on the batch that `collect` returned last is done; with its last use, its prompts are too."""
        assert self._in_training is not None, "no batch is in training"
        self._updates_done += 1
        if self._updates_done < self._updates_per_batch:
            return
        self._state = self._call(_soon(self._finish, self._in_training))
        self._in_training = None

    def _finish(self, batch: Batch) -> dict[str, Any]:
        self.collector.trained(batch)
        return self.collector.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, plain numbers, strings and lists; may be taken at any time.

        It belongs to the weights of the last step that was reported by `trained`. Prompts of episodes in flight, of
        batches collected ahead and of a batch with updates left are `unfinished`: they are sampled anew after a resume.
        """
        return self._state if self._held else self._call(_soon(self.collector.state_dict))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state, before the first `collect`.

        Raises:
            ValueError: it belongs to another number of tasks or another seed.
        """
        self._call(_soon(self.collector.load_state_dict, state))
        self._state = self._call(_soon(self.collector.state_dict))

    def load_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Serve new weights; on an error the old ones stay. Returns early where the run was asked to stop.

        `stream` is walked in the caller's thread, where its collectives belong, and no further than the engine asks.
        """
        self._handover = handover = Handover(getattr(stream, "probe", None))
        loading = self._begin_stoppable(self.engine.load_weights(handover, version))
        loading.add_done_callback(lambda _: handover.stop())
        if self._broken.done():
            handover.stop()
        handover.feed(stream)
        with contextlib.suppress(CancelledError):
            self._result(loading)

    def close(self) -> None:
        """End episodes in flight, free the engine, end the thread; returns in seconds, whatever hangs."""
        if self._closed:
            return
        self._closed = True
        closing = self._begin(self._close())
        wait({closing}, timeout=CLOSE_SECONDS if self._held else 3 * CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(0 if self._held and not closing.done() else CLOSE_SECONDS)
        if self._thread.is_alive():
            print("rollouts: an environment blocks the rollout thread; abandoning it", file=sys.stderr)
        else:
            self._loop.close()

    async def _close(self) -> None:
        for close in (self.collector.close, self.engine.close):
            try:
                await asyncio.wait_for(close(), CLOSE_SECONDS)
            except TimeoutError:
                print(f"rollouts: {close.__qualname__} did not close within {CLOSE_SECONDS:g} s", file=sys.stderr)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        stopped = False
        while not stopped:
            try:
                self._loop.run_forever()
                stopped = True
            except BaseException as error:  # sys.exit in a library must not end this thread in silence
                if not self._broken.done():
                    self._broken.set_exception(error)

    def _begin(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._result(self._begin(coroutine))

    def _result(self, future: Future[T]) -> T:
        wait({future, self._broken}, return_when=FIRST_COMPLETED)
        if self._broken.done():
            error = self._broken.exception()
            raise RuntimeError(f"the rollouts' event loop was interrupted by {error!r}") from error
        return future.result()


async def _soon(function: Callable[..., T], *arguments: Any) -> T:
    return function(*arguments)


class Handover:
    """An iterable for one thread that is fed in another: an element is made when it is asked for, none ahead.

    The next element is asked for when the last one is done with, so at most one lies between the two threads.
    """

    def __init__(self, probe: Probe | None = None) -> None:
        self.probe = probe  # what the tensors must compute, for an engine that asks
        self._wanted: SimpleQueue[bool] = SimpleQueue()  # True: the next one, False: no more
        self._given: SimpleQueue[Named | BaseException | None] = SimpleQueue()

    def __iter__(self) -> Iterator[Named]:
        """In the receiving thread; an error of the stream, or of the thread that feeds it, is told here as well."""
        while True:
            self._wanted.put(True)
            item = self._given.get()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise RuntimeError(f"the weight stream broke off: {item!r}") from item
            yield item

    def feed(self, stream: Iterable[Named]) -> None:
        """In the thread that owns `stream`; returns when the receiver wants no more."""
        source = iter(stream)
        try:
            while self._wanted.get():
                self._given.put(next(source, None))
            self._given.put(RuntimeError("no more is wanted"))  # a receiver that was cancelled may wait in its thread
        except BaseException as error:  # Ctrl-C too: the receiver must not wait for what will not come
            self._given.put(error)
            raise

    def stop(self) -> None:
        """The receiver has ended, well or not."""
        self._wanted.put(False)
