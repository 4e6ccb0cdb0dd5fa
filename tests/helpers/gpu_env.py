"""The environment of `make gpu-env`: what a GPU's image holds, as far as it is there without a GPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from paths import ROOT

FOLDER = ROOT / os.environ.get("GPU_VENV", ".venv-gpu")
PYTHON = FOLDER / "bin" / "python"
IS_THERE = (FOLDER / ".ready").is_file()


def run(*command: str | Path, folder: Path, timeout: float = 300, **variables: str) -> subprocess.CompletedProcess[str]:
    """A program of this name in that environment; its process finds this checkout's package."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    program, *arguments = command
    return subprocess.run(
        [FOLDER / "bin" / program, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
