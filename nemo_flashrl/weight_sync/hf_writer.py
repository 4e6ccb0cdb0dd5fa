"""Folders in the layout of Hugging Face and of PEFT, which appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def new_folder(target: str | Path) -> Iterator[Path]:
    """Yield an empty folder beside `target`, which takes that name when the block ends well and goes when it fails.

    Its name is used once: two writers never meet, and of two that want the same target the second is refused.

    Raises:
        ValueError: the target exists, or the file system refuses to write.
    """
    target = Path(target)
    refuse_existing(target)
    staging = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        staging.mkdir(parents=True)
        yield staging
        refuse_existing(target)
        staging.rename(target)
    except OSError as error:
        if target.exists():  # another writer came between the check and the renaming
            refuse_existing(target)
        raise ValueError(f"{target} could not be written ({error}) and was removed") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def refuse_existing(target: str | Path) -> None:
    """ValueError if there is something of that name."""
    if Path(target).exists():
        raise ValueError(f"{target} exists: an export never overwrites; choose another folder or remove it")
