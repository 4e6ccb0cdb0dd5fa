"""A process that finds Transformer Engine's stand-in, and a GPU where it is told to; cases of tests are forked from it.

    python stand_in_process.py cpu|cuda|gpu [WORKER] < requests

With the interpreter of `make gpu-env` it is Transformer Engine itself, whose layers hold weights on a CPU.

Megatron and NeMo look for both when they are imported, which in the process of the tests was long ago; importing them
once for all cases is what takes the time. `cuda` is fake CUDA. `gpu` is a real one with the real Transformer Engine:
nothing can be forked from a process that has seen it, so it answers itself, once. WORKER is imported at once.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

HELPERS = Path(__file__).parent
STAND_IN = HELPERS.parent / "transformer_engine_stand_in"
ROOT = HELPERS.parents[1]
ENVIRONMENT = {  # as conf/cluster has it
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}


class StandInProcess:
    """`run("x", ...)` calls `main(...)` of workers/x.py there, in forks that have imported what the module imports."""

    def __init__(self, device: str, *first: str, engine_python: Path | None = None) -> None:
        self._device, self._first, self._python = device, first, engine_python
        self._process = self._start()

    def _start(self) -> subprocess.Popen:
        stand_in = [] if self._device == "gpu" or self._python else [str(STAND_IN)]
        path = [*stand_in, str(HELPERS), str(ROOT / "benchmarks"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        return subprocess.Popen(
            [self._python or sys.executable, "-W", "ignore", __file__, self._device, *self._first],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(path)},
            process_group=0,
        )

    def run(self, worker: str, *, ranks: int = 1, limit: float | None = None, **options: Any) -> Any:
        """What `main` returns on rank 0, as JSON carries it. AssertionError with the traceback where a rank raises.

        More than one rank find each other as those of torchrun do. After `limit` seconds all are ended, with an
        AssertionError that says so.
        """
        request = {"worker": worker, "ranks": ranks, "options": options}
        if self._process.poll() is not None:  # with the run before
            self._process = self._start()
        print(json.dumps(request), file=self._process.stdin, flush=True)
        if limit is not None and not select.select([self._process.stdout], [], [], limit)[0]:
            self.kill()
            raise AssertionError(f"over its limit of {limit:.0f} s")
        line = self._process.stdout.readline()
        assert line, "the stand-in's process has ended"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def kill(self) -> None:
        """At once, with the forks."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=30)


class GpuProcesses:
    """`run` as a StandInProcess has it, on a real GPU: each in a fresh process; the next ones import while one runs."""

    def __init__(self, ahead: int, first: str) -> None:
        self._first = first
        self._waiting = [StandInProcess("gpu", first) for _ in range(ahead)]

    def run(self, worker: str, **options: Any) -> Any:
        process = self._waiting.pop(0)
        self._waiting.append(StandInProcess("gpu", self._first))
        try:
            return process.run(worker, **options)
        finally:
            process.kill()

    def kill(self) -> None:
        for process in self._waiting:
            process.kill()


def _serve(device: str, *first: str) -> None:
    if device == "cuda":
        import fake_cuda

        fake_cuda.install()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed here is for a person
    for worker in first:
        with contextlib.suppress(Exception):  # whoever needs it raises it again
            importlib.import_module(f"workers.{worker}")
    for line in sys.stdin:
        answer = _answer_here if device == "gpu" else _answer
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
    os._exit(0)  # taking down what Megatron and NeMo have made takes seconds


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        worker = importlib.import_module(f"workers.{request['worker']}")
    except BaseException:
        return {"error": traceback.format_exc()}
    port = _free_port()
    ranks = [_fork(worker, request, rank, port) for rank in range(request["ranks"])]
    told = []
    for child, reading in ranks:
        with os.fdopen(reading) as pipe:
            told.append(json.loads(pipe.read() or '{"error": "a fork ended without an answer"}'))
        os.waitpid(child, 0)
    errors = [answer["error"] for answer in told if "error" in answer]
    return {"error": "\n".join(errors)} if errors else told[0]


def _answer_here(request: dict[str, Any]) -> dict[str, Any]:
    """Of one rank."""
    _be_rank(0, 1, _free_port())
    try:
        worker = importlib.import_module(f"workers.{request['worker']}")
        return {"result": worker.main(**request["options"])}
    except BaseException:
        return {"error": traceback.format_exc()[-6000:]}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _be_rank(rank: int, ranks: int, port: int) -> None:
    world = str(ranks)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, GROUP_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="test")


def _fork(worker: Any, request: dict[str, Any], rank: int, port: int) -> tuple[int, int]:
    """Its process and where its answer will be read."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    _be_rank(rank, request["ranks"], port)
    try:
        answer = json.dumps({"result": worker.main(**request["options"])})
    except BaseException:
        answer = json.dumps({"error": f"rank {rank}: {traceback.format_exc()[-6000:]}"})
    with os.fdopen(writing, "w") as out:
        out.write(answer)
    os._exit(0)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
