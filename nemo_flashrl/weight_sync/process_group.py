"""The trainer and the workers of its servers as one process group, from either end.

It stands beside the default group that each of them has. No rank enters a collective before all have said through
the trainer's store that they will, so a rank that refuses or is gone is found before anybody waits for it:

    worker: report(step) ---------------------> await_decision(step) -> act      connect() or broadcast()
    trainer:      all reported? -> decide(step) ----------------------> act
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, TCPStore

from nemo_flashrl import platform

TRAINER = 0  # its rank
CONNECT = "connect"  # the first step of every group
GO, STOP = b"go", b"stop"
_SPIN_SECONDS, _LOOK_SECONDS = 0.002, 0.5


class WeightGroup:
    """One rank of it.

    Args:
        store: the trainer's, or a connection to it.
        name: of the group; a store serves many, one after another.
        rank: 0 is the trainer.
        size: the trainer and all workers.
        timeout: seconds for any one step, and for any one tensor.
    """

    def __init__(self, store: TCPStore, name: str, rank: int, size: int, timeout: float) -> None:
        self._store = PrefixStore(name, store)
        self._rank, self._size, self._timeout = rank, size, timeout
        self._group: torch.distributed.Backend | None = None

    def report(self, step: str, refusal: str = "") -> None:
        """Say that this worker will take part in `step`, or why it will not."""
        self._store.set(f"{step}/{self._rank}", refusal)

    def reports(self, step: str) -> dict[int, str]:
        """Refusal, empty for none, by rank of the workers that have reported so far; does not wait."""
        keys = {rank: f"{step}/{rank}" for rank in range(1, self._size)}
        return {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}

    def decide(self, step: str, decision: bytes) -> None:
        """Tell all workers to go on with `step`, or to stop it, also within it."""
        self._store.set(f"{step}/{'stopped' if decision == STOP else 'go'}", "")

    def await_decision(self, step: str) -> None:
        """Wait until the trainer lets `step` go on.

        Raises:
            RuntimeError: it stops the step, says nothing in time, or is gone.
        """
        deadline = time.monotonic() + self._timeout
        while not self._store.check([f"{step}/go"]):
            if self._store.check([f"{step}/stopped"]) or time.monotonic() > deadline:
                raise RuntimeError(f"the trainer gave up {step}")
            time.sleep(_SPIN_SECONDS)

    def connect(self) -> None:
        """Make the process group, together with all other ranks."""
        self._group = platform.make_process_group(self._store, self._rank, self._size, self._timeout)

    def broadcast(self, tensor: torch.Tensor, step: str) -> None:
        """Fill `tensor` on every worker with the trainer's; returns when it is there.

        Raises:
            RuntimeError: a rank is gone, the trainer stopped `step`, or the time is over; the group is of no more use.
        """
        work = self._group.broadcast(tensor, TRAINER)
        try:
            started = looked = time.monotonic()
            while not work.is_completed():
                now = time.monotonic()
                if now - started > _SPIN_SECONDS:
                    time.sleep(_SPIN_SECONDS / 4)
                if now - started > self._timeout or (now - looked > _LOOK_SECONDS and self._is_stopped(step)):
                    self.abort()
                    raise RuntimeError(f"{step} broke off within a tensor of shape {tuple(tensor.shape)}")
                looked = now if now - looked > _LOOK_SECONDS else looked
            work.wait(timedelta(seconds=self._timeout))  # raises what went wrong
        finally:
            del work  # an error's traceback would keep it, and it keeps the connections open

    def abort(self) -> None:
        """Close all connections, which ends other ranks' waiting for this one; returns at once."""
        if self._group is not None:  # in a thread: what is under way may end only when another rank closes too
            box, self._group = [self._group], None
            threading.Thread(target=_close, args=(box,), daemon=True).start()

    def _is_stopped(self, step: str) -> bool:
        return self._store.check([f"{step}/stopped"])


def _close(box: list[torch.distributed.Backend]) -> None:
    """`box` holds the only reference: whoever drops the last one waits for what is under way, until its time-out."""
    box.pop().abort()
