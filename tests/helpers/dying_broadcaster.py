"""A trainer that is gone in the middle of a broadcast: `python dying_broadcaster.py URL VOCAB CHECKPOINT`."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from safetensors.torch import load_file

from nemo_flashrl.engines import BroadcastEngine
from nemo_flashrl.weight_sync.process_group import WeightGroup

SENT = 3  # tensors that go out before
send, count = WeightGroup.broadcast, iter(range(SENT))


def send_some(*arguments: object) -> None:
    if next(count, None) is None:
        os._exit(9)
    send(*arguments)


async def begin(url: str, vocab_size: str, checkpoint: str) -> None:
    engine = BroadcastEngine([url], int(vocab_size), timeout=240.0)
    await engine.load_weights(load_file(Path(checkpoint) / "model.safetensors").items(), 9)


WeightGroup.broadcast = send_some
asyncio.run(begin(*sys.argv[1:]))
