"""What the reference takes beside a model: host memory, and the allocator's peak while the two change places."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from allocations import allocator_peak
from megatron.core import parallel_state

from nemo_flashrl import platform
from nemo_flashrl.models.shadow_weights import ShadowWeights


def main(out: Path, layers: int, width: int) -> None:
    torch.distributed.init_process_group(platform.backend())
    parallel_state.initialize_model_parallel(1, 1)
    report = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers))).to(dtype)
        shadow = ShadowWeights(model)

        def swap(shadow: ShadowWeights = shadow) -> None:
            with shadow.swapped_in():
                pass

        report[str(dtype)] = {
            "host": sum(value.untyped_storage().nbytes() for value in shadow.values.values()),
            "swap": allocator_peak(swap),
            "follow": allocator_peak(lambda shadow=shadow: shadow.follow(0.9)),
        }
    out.write_text(json.dumps(report))
