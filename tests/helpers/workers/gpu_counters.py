"""A few operations on fake CUDA whose costs are known."""

from __future__ import annotations

import torch
from fake_cuda import seem_to_have_cuda
from gpu_recorder import Answer, Recorder, one_kernel, walk


@one_kernel
def activated(values: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(values) * values.sigmoid()


def main() -> dict:
    seem_to_have_cuda()
    with Recorder([Answer("gpu_counters", "if wide.sum()", True), Answer("gpu_counters", "wide[mask]", 7)]) as recorder:
        weight = torch.empty(1024, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        recorder.restart()
        product = weight @ weight
        wide = product.float()
        found = {"peak": recorder.peak, "events": [(e.name, e.flops, e.bytes) for e in recorder.events]}
        del product
        wide.sum().backward()
        found["gradient"] = str(weight.grad.device)
        wide = wide.detach()
        recorder.restart()
        activated(wide)
        found["fused"] = [(e.name, e.bytes) for e in recorder.events], recorder.peak - recorder.current
        host, mask = torch.empty(1024, 1024), torch.empty(1024, 1024, dtype=torch.bool, device="cuda")
        host.copy_(wide)
        host.copy_(wide, non_blocking=True)
        if wide.sum():
            found["chosen"] = list(wide[mask].shape)
        found["waits"] = list(walk(recorder))
        found["late"] = recorder.late_copies.total()
        for name, wrong in (("mismatch", lambda: wide + host), ("unanswered", lambda: float(wide.sum()))):
            try:
                wrong()
            except (RuntimeError, AssertionError) as error:
                found[name] = str(error)
    return found
