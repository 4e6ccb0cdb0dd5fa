"""Hosts of one Slurm step: can they reach the first one, do their clocks agree, do they share a folder."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from nemo_flashrl.launch.processes import adopt_tasks

WAIT_SECONDS = 60.0
VISIBLE_SECONDS = 10.0  # what a network file system may take to show another host's file
CLOCK_SECONDS = 1.0


def compare_hosts(output: str) -> Iterator[tuple[str, bool, str]]:
    """(what, whether it is well, what was found), on every task of a step; nothing outside a step of several tasks.

    The first task listens where a run's ranks would meet and writes a file beside `output`; the others ask for its
    time and look for the file. A clock's difference is taken at the middle of the exchange (Cristian 1989).
    """
    step = dict(os.environ)
    adopt_tasks(step)
    if int(step.get("WORLD_SIZE", "1")) == 1:
        return
    address = (step["MASTER_ADDR"], int(step["MASTER_PORT"]))
    marker = Path(output).absolute().parent / f".flashrl-doctor-{uuid.uuid4().hex}" if output else None
    if step["RANK"] == "0":
        yield _serve(address[1], int(step["WORLD_SIZE"]) - 1, marker)
    else:
        yield from _ask(address)


def _serve(port: int, others: int, marker: Path | None) -> tuple[str, bool, str]:
    answered = 0
    if marker is not None:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    try:
        with socket.create_server(("", port)) as server:
            server.settimeout(WAIT_SECONDS)
            while answered < others:
                peer, _ = server.accept()
                with peer:
                    peer.settimeout(WAIT_SECONDS)
                    peer.recv(1)
                    peer.sendall(f"{time.time()} {marker or ''}\n".encode())
                    peer.recv(1)  # it has looked for the file
                answered += 1
    except OSError as error:
        return "rendezvous", False, f"port {port}: {answered} of {others} other tasks connected, then {error}"
    finally:
        if marker is not None:
            marker.unlink()
    return "rendezvous", True, f"port {port}: {others} other tasks connected"


def _ask(address: tuple[str, int]) -> Iterator[tuple[str, bool, str]]:
    name = f"{address[0]}:{address[1]}"
    try:
        peer = _connect(address)
    except OSError as error:
        yield "rendezvous", False, f"{name} cannot be reached: {error}"
        return
    yield "rendezvous", True, f"{name} answers"
    with peer:
        before = time.time()
        peer.sendall(b"t")
        clock, _, marker = peer.makefile().readline().rstrip("\n").partition(" ")
        skew = float(clock) - (before + time.time()) / 2
        yield "clock", abs(skew) <= CLOCK_SECONDS, f"{abs(skew):.3f} s off {address[0]}'s"
        if marker:
            shared = _appears(Path(marker))
            yield (
                "shared output",
                shared,
                f"{Path(marker).parent} is {'shared' if shared else 'not shared'} with {address[0]}",
            )
        peer.sendall(b"d")


def _connect(address: tuple[str, int]) -> socket.socket:
    end = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            return socket.create_connection(address, timeout=WAIT_SECONDS)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def _appears(file: Path) -> bool:
    end = time.monotonic() + VISIBLE_SECONDS
    while not file.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True
