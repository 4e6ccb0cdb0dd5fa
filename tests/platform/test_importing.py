"""Garbage collection at the two ends of a process."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from nemo_flashrl import platform


def test_nothing_is_collected_while_modules_are_imported() -> None:
    with platform.importing():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), platform.importing():
        raise ImportError
    assert gc.isenabled()


def test_a_command_ends_without_a_collection() -> None:
    """What is frozen is not looked at; exit functions run in the reverse order, so the one here sees what main did."""
    script = (
        "import atexit, gc, sys; atexit.register(lambda: print('frozen' if gc.get_freeze_count() else 'looked at'));"
        "from nemo_flashrl.cli import main; sys.exit(main(['plan', 'rehearsal']))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.stdout.splitlines()[-1] == "frozen", ended.stderr
