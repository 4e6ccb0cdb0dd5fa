"""The reference policy on a device: bits, pinned host memory, and what a swap takes."""

from __future__ import annotations

import torch
from gpu_device import Device, join_world
from gpu_recorder import Answer
from megatron.core import parallel_state

from nemo_flashrl.models.shadow_weights import ShadowWeights


def main(dtype: str, layers: int, width: int) -> dict:
    with Device([Answer("shadow_weights", "tolist()", 1.0)]) as device:
        join_world()
        parallel_state.initialize_model_parallel(1, 1)
        return swap(device, getattr(torch, dtype), layers, width)


def swap(device: Device, dtype: torch.dtype, layers: int, width: int) -> dict:
    parts = (torch.nn.Linear(width, width, bias=False, device="cuda", dtype=dtype) for _ in range(layers))
    model = torch.nn.Sequential(*parts)
    shadow = ShadowWeights(model)
    found: dict = {
        "pinned": device.is_real and all(v.is_pinned() and v.dtype == torch.float32 for v in shadow.values.values())
    }
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    found["follow_ms"] = device.milliseconds(lambda: shadow.follow(0.5), 1)
    policy = [p.detach().clone() for p in model.parameters()]
    average = [value.clone() for value in shadow.values.values()]

    def compare() -> None:
        with shadow.swapped_in():
            # A tie is rounded away from zero here: one in 65536 may differ by the last bit.
            differ = [(p.cpu() != v.to(dtype)).float().mean() for p, v in zip(model.parameters(), average, strict=True)]
            found["differ_within"] = max(map(float, differ))

    def exchange() -> None:
        with shadow.swapped_in():
            pass

    compare()
    held = device.held
    peak, waits = device.peak_and_waits_of(exchange)
    found["peak_bytes"], found["swap_syncs"] = peak - held, sum(count for *_, count in waits)
    found["swap_ms"] = device.milliseconds(exchange, 3)
    found["policy_bits"] = all(torch.equal(a, b) for a, b in zip(policy, model.parameters(), strict=True))
    found["average_bits"] = all(torch.equal(a, b) for a, b in zip(average, shadow.values.values(), strict=True))
    return found
