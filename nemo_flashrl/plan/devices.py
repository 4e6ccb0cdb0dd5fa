"""What `flashrl plan` knows of accelerators, from their makers' data sheets (SXM boards, dense bf16)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """One board."""

    memory_gib: float  # that a process can have: the sheet's gigabytes less what the driver keeps
    bf16_tflops: float
    bandwidth_gb: float  # of its memory, GB/s


DEVICES = {
    "A100": Device(79.1, 312, 2039),
    "A800": Device(79.1, 312, 2039),
    "H100": Device(79.1, 989, 3350),
    "H800": Device(79.1, 989, 3350),
    "H20": Device(95.0, 148, 4000),
    "H200": Device(139.8, 989, 4800),
    "B200": Device(178.0, 2250, 8000),
}
USABLE = 0.92  # the rest is for the CUDA context, NCCL's buffers, temporaries and the allocator's gaps


def find_device(name: str) -> Device:
    """By name; ValueError lists the known ones."""
    if name.upper() not in DEVICES:
        raise ValueError(f"device {name!r} is not known; known: {', '.join(DEVICES)}")
    return DEVICES[name.upper()]
