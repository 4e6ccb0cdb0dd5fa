"""Types of the command line's arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


def at_least(lowest: int) -> Callable[[str], int]:
    """Whole numbers from `lowest` on, for argparse's `type`."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least {lowest}")
        return int(text)

    return number


def file_to_write(text: str) -> Path:
    """A path that is no folder, for argparse's `type`."""
    if not text or Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: must name a file" + (", and is a folder" if text else ""))
    return Path(text)
