"""A process that believes that it has a GPU, and from which each case of a test is forked.

    python fake_gpu.py < requests

torch must find the guard of fake_cuda.py when it is imported, which in the process of the tests was long ago.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

HELPERS = Path(__file__).parent


class FakeGpu:
    """`run("x", ...)` calls `main(...)` of workers/x.py there, in a fork that has imported what the module imports."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        )

    def run(self, worker: str, **options: Any) -> Any:
        """What `main` returns, as JSON carries it. AssertionError with the traceback where it raises."""
        print(json.dumps({"worker": worker, "options": options}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, "the fake GPU's process has ended"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=30)


def serve() -> None:
    import fake_cuda

    fake_cuda.install()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed here is for a person
    for line in sys.stdin:
        request = json.loads(line)
        try:
            worker = importlib.import_module(f"workers.{request['worker']}")
        except BaseException:
            print(json.dumps({"error": traceback.format_exc()}), file=answers, flush=True)
            continue
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            with os.fdopen(writing, "w") as out:
                try:
                    answer = json.dumps({"result": worker.main(**request["options"])})
                except BaseException:
                    answer = json.dumps({"error": traceback.format_exc()[-6000:]})
                out.write(answer)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as told:
            answer = told.read()
        os.waitpid(child, 0)
        print(answer or json.dumps({"error": "the fork ended without an answer"}), file=answers, flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(HELPERS))
    serve()
