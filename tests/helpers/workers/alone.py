"""The parity worker in a process of its own, for another megatron-core than the fork server has imported."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import torch


def main() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)

    from nemo_flashrl import platform

    platform.install()
    import megatron.core

    print(f"megatron-core {megatron.core.__version__}")
    from workers import parity

    model, trajectories, out = map(Path, sys.argv[1:])
    parity.main(model, trajectories, out, 131, gate=False)


if __name__ == "__main__":
    main()
