"""What runs the checks of tests/gpu and writes down what they find."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_sizes import LIMITS, QUICK_WHOLE, WHOLE
from stand_in_process import GpuProcesses, StandInProcess

from nemo_flashrl import platform
from nemo_flashrl.doctor.node import installed

FIRST = "gpu_step"  # imports what takes long, in the order in which a run does
CORES_AHEAD = 2  # for each process that imports ahead of its check
ORDER = ("policy_head", "step", "layers")  # where time runs out the others are left out


class Gpu:
    """`run` in a process where there is a GPU, real or fake."""

    def __init__(self, *, is_real: bool, is_quick: bool) -> None:
        self.is_real, self.is_quick = is_real, is_quick
        self.whole = QUICK_WHOLE if is_quick else WHOLE
        self._deadline = time.monotonic() + self.whole
        ahead = max(1, min(8, len(os.sched_getaffinity(0)) // CORES_AHEAD))
        self._processes = GpuProcesses(ahead, FIRST) if is_real else StandInProcess("cuda", FIRST)

    def run(self, worker: str, limit: str, options: dict[str, Any]) -> dict:
        if not self.is_real:  # a busy CPU may take any time
            return self._processes.run(worker, **options)
        seconds = min(LIMITS[limit], self._deadline - time.monotonic())
        if seconds <= 0:
            raise AssertionError(f"not run: the {self.whole:.0f} s of all checks are over")
        return self._processes.run(worker, limit=seconds, **options)

    def close(self) -> None:
        self._processes.kill()


class Check:
    """What one test has of the device; what it finds goes to the report."""

    def __init__(self, gpu: Gpu, found: dict) -> None:
        self.is_real, self.is_quick = gpu.is_real, gpu.is_quick
        self._gpu, self._found = gpu, found

    def run(self, worker: str, kind: str, /, **options: Any) -> dict:
        """What workers/`worker`.py measures; skips where it says why it cannot. `kind` has the limit."""
        found = self._gpu.run(worker, kind, options)
        self._found.update(found)
        if "skipped" in found:
            pytest.skip(found["skipped"])
        return found


class Report:
    """One JSON of all checks, written again after each, so that a run that is cut off leaves what it has found."""

    def __init__(self, config: pytest.Config) -> None:
        self.file = Path(config.getoption("--report"))
        self.start = time.monotonic()
        self.content: dict[str, Any] = {
            "fake": bool(config.getoption("--fake")),
            "quick": bool(config.getoption("--quick")),
            "machine": machine(),
            "versions": versions(),
            "checks": [],
        }

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        places = {f"test_{name}_gpu.py": place for place, name in enumerate(ORDER)}
        items.sort(key=lambda item: places.get(item.path.name, len(places)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        check: dict[str, Any] = {
            "name": report.nodeid.split("/")[-1],
            "outcome": report.outcome,
            "seconds": round(report.duration, 2),
            "measured": dict(report.user_properties).get("measured", {}),
        }
        if report.skipped:
            check["reason"] = str(report.longrepr[-1]).removeprefix("Skipped: ")
        elif report.failed:
            check["message"] = str(report.longrepr)[-4000:]
        self.content["checks"].append(check)
        self.write()

    def pytest_sessionfinish(self) -> None:
        self.write()

    def write(self) -> None:
        counts = [check["outcome"] for check in self.content["checks"]]
        self.content |= {outcome: counts.count(outcome) for outcome in ("passed", "failed", "skipped")}
        self.content["seconds"] = round(time.monotonic() - self.start, 1)
        self.file.write_text(json.dumps(self.content, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """Of a node no more than what its numbers depend on."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    there = platform.describe()
    found: dict[str, Any] = {"gpus": there["devices"], "gpu": there["name"], "gpu_memory_gib": there["memory_gib"]}
    return found | {"cores": len(os.sched_getaffinity(0)), "memory_gib": round(memory, 1)}


def versions() -> dict[str, str | None]:
    packages = (
        *("nemo_flashrl", "nemo_toolkit", "megatron-core", "transformer-engine", "flash-attn", "apex", "triton"),
        *("lightning", "transformers", "liger-kernel", "vllm", "numpy"),
    )
    there = platform.describe()
    found: dict[str, str | None] = {"python": ".".join(map(str, sys.version_info[:3])), "torch": there["torch"]}
    found |= {"cuda": there["CUDA"] or None, "nccl": there["NCCL"] or None, "cudnn": None}
    if torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found | {name: installed(name) for name in packages}
