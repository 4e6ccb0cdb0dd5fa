"""The commands of `flashrl`, one file each: its arguments, and what it prints; here the types of arguments."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path


def at_least(lowest: int, highest: int | None = None) -> Callable[[str], int]:
    """Whole numbers from `lowest` on, up to `highest` where one is given, for argparse's `type`."""
    bounds = f"of at least {lowest}" if highest is None else f"from {lowest} to {highest}"

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < lowest or (highest is not None and int(text) > highest):
            raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number {bounds}")
        return int(text)

    return number


def path(text: str) -> Path:
    """With ~ expanded, for argparse's `type`: a shell leaves it alone in `--output=~/runs`."""
    return Path(os.path.expanduser(text))


def file_to_write(text: str) -> Path:
    """A path that is no folder, for argparse's `type`."""
    if not text or path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: must name a file" + (", and is a folder" if text else ""))
    return path(text)
