"""Real processes for the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

WORKERS = Path(__file__).parent / "workers"


def torchrun(processes: int, script: str, *arguments: object, timeout: float = 300, **environment: str) -> None:
    """Run a worker script in `processes` processes; its output is shown when it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += [str(WORKERS / script), *map(str, arguments)]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-6000:]
