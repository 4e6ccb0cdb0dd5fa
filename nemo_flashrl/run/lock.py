"""One run at a time in an output folder: the run's first process holds a lock on a file there while it trains."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path

LOCK = "run.lock"  # holds pid@host of who has it, or had it last
TAKEN = (errno.EWOULDBLOCK, errno.EACCES)
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)  # Lustre without the mount option `flock`
_held: set[int] = set()


def _leave_to_parent() -> None:
    """A lock lasts as long as any process has the file open, and checkpoint writers, forked, may outlive a kill."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_leave_to_parent)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder`, made where it is not there, until the block ends; the kernel frees it when the process dies.

    `flock` reaches over the hosts of a shared file system (NFS 4, and Lustre mounted with `flock`); where the file
    system has no locks the run continues with a warning.

    Raises:
        ValueError: another process holds it, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ValueError(f"output={str(folder)!r}: cannot be written ({error}): name a folder that can be") from error
    _held.add(file)
    try:
        _take(file, folder)
        yield
    finally:
        _held.discard(file)
        os.close(file)


def in_use(folder: Path) -> bool:
    """Whether a run is at work there now; changes nothing."""
    try:
        with open(folder / LOCK, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in TAKEN
    return False


def _take(file: int, folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in TAKEN:
            pid, _, host = os.pread(file, 1000, 0).decode(errors="replace").strip().partition("@")
            raise ValueError(
                f"output={str(folder)!r}: in use by pid {pid} on host {host}: wait for it, or name another folder"
            ) from error
        if error.errno not in NO_LOCKS:
            raise
        warnings.warn(
            f"output={str(folder)!r}: its file system has no locks ({error}): a second run in it is not prevented",
            stacklevel=4,
        )
    owner = f"{os.getpid()}@{socket.gethostname()}\n".encode()
    try:
        os.ftruncate(file, 0)
        os.pwrite(file, owner, 0)
    except OSError as error:
        raise ValueError(f"output={str(folder)!r}: cannot be written ({error}): name a folder that can be") from error
