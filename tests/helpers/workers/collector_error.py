"""A collector that fails on the first rank of two."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from megatron.core import parallel_state

from nemo_flashrl import platform
from nemo_flashrl.data.datamodule import RolloutDataModule


def fail(version: int):
    raise ConnectionError("no server answers")


def main(out: Path) -> None:
    torch.distributed.init_process_group(platform.backend())
    parallel_state.initialize_model_parallel(1, 1)
    rank = torch.distributed.get_rank()
    data = RolloutDataModule(fail if rank == 0 else None, algorithm=None, batcher=None)
    try:
        data.next_step(0)
    except ConnectionError as error:
        (out / f"{rank}.json").write_text(json.dumps([type(error).__name__, str(error)]))
