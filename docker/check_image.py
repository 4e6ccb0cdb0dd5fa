"""Build-time check: the package, the trainer under it and the command line import in this image.

What an image should hold and does not is listed; only what training cannot do without fails the build.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys

NEEDED = ("torch", "nemo_toolkit", "megatron-core", "lightning", "transformers", "hydra-core")
USEFUL = ("transformer-engine", "flash-attn", "apex", "nemo_run")
MODULES = ("nemo_flashrl.train", "nemo_flashrl.models", "nemo_flashrl.data", "nemo_flashrl.callbacks")


def main() -> int:
    missing = [name for name in NEEDED if version(name) is None]
    for name in (*NEEDED, *USEFUL):
        print(f"{name:<20} {version(name) or 'not installed'}")
    if missing:
        print(f"the base image lacks {', '.join(missing)}: choose a NeMo image", file=sys.stderr)
        return 1
    from nemo_flashrl import platform

    platform.install()
    for module in MODULES:
        importlib.import_module(module)
    return subprocess.run(["flashrl", "--help"], stdout=subprocess.DEVNULL, check=False).returncode


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
