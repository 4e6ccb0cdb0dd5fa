"""Rollout servers of the tests, each a real process: stand-ins that misbehave on command."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

from paths import HELPERS


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class StandIn:
    """One `stand_in_server.py`, or another script with its arguments after the port."""

    def __init__(self, script: str = "stand_in_server.py", *arguments: object) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [sys.executable, str(HELPERS / script), str(self.port), *map(str, arguments)]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.command)
        deadline = time.monotonic() + 60
        while True:
            try:
                return self.behave()
            except OSError:
                assert time.monotonic() < deadline and self.process.poll() is None, "the stand-in does not start"
                time.sleep(0.05)

    def behave(self, **how: Any) -> None:
        """Act so from now on; nothing is to behave well."""
        request = urllib.request.Request(f"{self.url}/behave", json.dumps(how).encode(), method="POST")
        request.add_header("Content-Type", "application/json")
        urllib.request.urlopen(request, timeout=60).close()

    def counts(self) -> dict[str, int]:
        with urllib.request.urlopen(f"{self.url}/counts", timeout=60) as answer:
            return json.load(answer)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.signal(signal.SIGKILL) if self.process.poll() is None else None
        self.process.wait()


def ended_after(servers: list[StandIn]) -> Iterator[list[StandIn]]:
    """For a fixture."""
    yield servers
    for server in servers:
        server.end()


def anew(servers: list[StandIn]) -> list[StandIn]:
    """All alive and well-behaved, whatever happened to them."""
    for server in servers:
        if server.process.poll() is not None:
            server.start()
        server.behave(begin_anew=True)
    return servers
