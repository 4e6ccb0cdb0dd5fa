"""A rank that says that it lives, and goes on living."""

from __future__ import annotations

import os
import time
from pathlib import Path


def main(beside: Path | str) -> None:
    beside = Path(beside)
    beside.with_name(f"{beside.name}.{os.environ['RANK']}").touch()
    time.sleep(600)
