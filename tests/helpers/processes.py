"""Real processes for the tests.

NeMo takes a quarter of a minute to import. A fork server imports it once, and every rank of every test is forked
from there; what the ranks then do over gloo is what ranks started by torchrun do.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any


def fork_server() -> Any:
    """The context whose processes have NeMo imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preload"])
    return context


def run_ranks(
    processes: int,
    worker: str,
    *arguments: Any,
    timeout: float = 240,
    exit_codes: tuple[int, ...] = (0,),
    **options: Any,
) -> str:
    """Call `main(*arguments, **options)` of `workers/<worker>.py` in ranks, and return what they printed.

    A rank ends with the code that `main` returns (None: 0, an exception: 1); one outside `exit_codes` fails the test.
    """
    context = fork_server()
    port = _free_port()
    with tempfile.TemporaryDirectory() as logs:
        ranks = [
            context.Process(target=_rank, args=(rank, processes, port, logs, worker, arguments, options))
            for rank in range(processes)
        ]
        for rank in ranks:
            rank.start()
        failed = _wait(ranks, timeout, exit_codes)
        output = "\n".join(f"--- rank {f.stem}\n{f.read_text()[-4000:]}" for f in sorted(Path(logs).iterdir()))
        assert not failed, f"{worker}: ranks {failed} failed\n{output}"
        return output


def _free_port() -> int:
    """Below the range from which the system gives ports to whoever asks for any, before the ranks can take this one."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            port = random.randrange(15000, 32000)
            probe.bind(("127.0.0.1", port))
            return port


def _wait(ranks: list[Any], timeout: float, exit_codes: tuple[int, ...]) -> list[int]:
    """Numbers of the ranks that did not end well; when one fails the others are ended, not waited for."""
    waiting = dict(enumerate(ranks))
    while waiting:
        ready = multiprocessing.connection.wait([r.sentinel for r in waiting.values()], timeout)
        ended = [n for n, r in waiting.items() if r.sentinel in ready]
        failed = [n for n in ended if waiting[n].exitcode not in exit_codes]
        if failed or not ready:
            for rank in waiting.values():
                rank.kill()
            return failed or sorted(waiting)
        for number in ended:
            waiting.pop(number).join()
    return []


def _rank(rank: int, world: int, port: int, logs: str, worker: str, arguments: tuple, options: dict) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="test",
    )
    with (Path(logs) / f"{rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            try:
                code = importlib.import_module(f"workers.{worker}").main(*arguments, **options) or 0
            except BaseException:
                traceback.print_exc()
                log.flush()
                os._exit(1)
    sys.stdout.flush()
    os._exit(code)
