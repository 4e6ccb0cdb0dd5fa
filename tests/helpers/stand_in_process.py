"""A process that finds Transformer Engine's stand-in, and a GPU where it is told to; cases of tests are forked from it.

    python stand_in_process.py cpu|cuda < requests

With the interpreter of `make gpu-env` it is Transformer Engine itself, whose layers hold weights on a CPU.

Megatron and NeMo look for both when they are imported, which in the process of the tests was long ago; importing them
once for all cases is what takes the time.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

HELPERS = Path(__file__).parent
STAND_IN = HELPERS.parent / "transformer_engine_stand_in"


class StandInProcess:
    """`run("x", ...)` calls `main(...)` of workers/x.py there, in forks that have imported what the module imports."""

    def __init__(self, device: str, *, engine_python: Path | None = None) -> None:
        own = [] if engine_python else [str(STAND_IN)]
        path = os.pathsep.join([*own, str(HELPERS), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [engine_python or sys.executable, "-W", "ignore", __file__, device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": path},
        )

    def run(self, worker: str, *, ranks: int = 1, **options: Any) -> Any:
        """What `main` returns on rank 0, as JSON carries it. AssertionError with the traceback where a rank raises.

        More than one rank find each other as those of torchrun do.
        """
        request = {"worker": worker, "ranks": ranks, "options": options}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, "the stand-in's process has ended"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=30)


def _serve(device: str) -> None:
    if device == "cuda":
        import fake_cuda

        fake_cuda.install()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed here is for a person
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), file=answers, flush=True)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        worker = importlib.import_module(f"workers.{request['worker']}")
    except BaseException:
        return {"error": traceback.format_exc()}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [_fork(worker, request, rank, port) for rank in range(request["ranks"])]
    told = []
    for child, reading in ranks:
        with os.fdopen(reading) as pipe:
            told.append(json.loads(pipe.read() or '{"error": "a fork ended without an answer"}'))
        os.waitpid(child, 0)
    return next((answer for answer in told if "error" in answer), told[0])


def _fork(worker: Any, request: dict[str, Any], rank: int, port: int) -> tuple[int, int]:
    """Its process and where its answer will be read."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    world = str(request["ranks"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, GROUP_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="test")
    try:
        answer = json.dumps({"result": worker.main(**request["options"])})
    except BaseException:
        answer = json.dumps({"error": f"rank {rank}: {traceback.format_exc()[-6000:]}"})
    with os.fdopen(writing, "w") as out:
        out.write(answer)
    os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1])
