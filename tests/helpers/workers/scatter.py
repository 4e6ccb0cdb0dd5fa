"""Shares of different sizes, as rank 0 hands them out; each rank writes what it got and how many bytes came."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from nemo_flashrl import platform
from nemo_flashrl.data.rank_step import scatter


def main(out: Path) -> None:
    torch.distributed.init_process_group(platform.backend())
    group, received = platform.object_group(), []
    receive = torch.distributed.recv

    def counted(buffer: torch.Tensor, **options) -> int:
        received.append(buffer.numel())
        return receive(buffer, **options)

    torch.distributed.recv = counted
    shares = [b"own", b"x" * 100_000, b"little"] if group.rank() == 0 else []
    share = scatter(shares, group)
    if group.rank() == 0:
        assert share is shares[0]
    (out / f"{group.rank()}.json").write_text(json.dumps([len(share), received]))
