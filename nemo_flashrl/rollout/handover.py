"""Tensors from the trainer's thread to the loop's, one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from queue import SimpleQueue

from torch import Tensor

from nemo_flashrl.rollout.probe import Probe

Named = tuple[str, Tensor]


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
        except BaseException as error:  # Ctrl-C too: the receiver must not wait for what will not come
            self._given.put(error)
            raise

    def stop(self) -> None:
        """The receiver has ended, well or not."""
        self._wanted.put(False)
