"""New weights for a server, over NCCL, where two processes may share the GPU."""

from __future__ import annotations

from gpu_checks import Check
from gpu_sizes import REFIT


def test_another_process_gets_every_bit(gpu: Check) -> None:
    """Over gloo on the CPU where the GPU is fake."""
    found = gpu.run("check_refit", "refit", **REFIT | ({} if gpu.is_real else {"width": 256}))
    assert found["library"].startswith("nccl" if gpu.is_real else "gloo")
    assert found["same_bits"]
