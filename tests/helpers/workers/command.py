"""A command line in a folder, as a person types it there."""

from __future__ import annotations

import atexit
import os
from pathlib import Path

from nemo_flashrl.cli import main as flashrl


def main(folder: Path, *arguments: str) -> int:
    """The command's exit code."""
    os.chdir(folder)
    code = flashrl(arguments)
    atexit._run_exitfuncs()  # a rank of the tests ends without them
    return code
