"""A Python file as the user runs it, in ranks that torchrun would have started."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main(path: Path, *arguments: str) -> None:
    sys.argv = [str(path), *arguments]
    runpy.run_path(str(path), run_name="__main__")
