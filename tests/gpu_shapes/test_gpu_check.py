"""`make gpu-check` on fake CUDA: every check walks its code, and the JSON has what somebody elsewhere needs of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_cuda import compiler
from gpu_sizes import HOST_SYNCS, over_budget
from paths import TESTS
from stand_in_process import StandInProcess

SCRIPT = TESTS / "gpu" / "check.py"


def test_all_checks_run_without_values(tmp_path: Path) -> None:
    if compiler() is None:
        pytest.skip("no C++ compiler (c++, or what CXX names), which fake CUDA's device guard needs")
    report = tmp_path / "gpu_check.json"
    command = [sys.executable, SCRIPT, "--fake", "--quick", "--report", report]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    found = json.loads(report.read_text())
    assert found["fake"] and found["quick"] and not found["failed"] and not found["skipped"]
    assert {"torch", "cuda", "nccl", "transformer-engine", "megatron-core", "nemo_toolkit", "triton"} <= set(
        found["versions"]
    )
    checks = {check["name"].split("[")[0]: check for check in found["checks"]}
    files = {file.name: file.read_text() for file in (TESTS / "gpu").glob("test_*.py")}
    written = {f"{name}::{test}" for name, text in files.items() for test in re.findall(r"def (test_\w+)", text)}
    assert checks.keys() == written
    assert all(check["measured"] for check in checks.values())
    step = checks["test_step_gpu.py::test_a_step_holds_what_the_plan_says"]["measured"]
    assert step["peak_bytes"] and step["plan"]["device"] and step["syncs"] and step["step_ms"] is None
    assert "fake CUDA: no value and no time" in ended.stdout


def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 2
    found = "no CUDA device is here"
    if torch.version.cuda is None:
        found = (
            f"{sys.executable} has torch's CPU build, which sees no CUDA device; make gpu-check VENV=none takes the "
            "machine's own Python"
        )
    assert ended.stderr == f"{found}; --fake (make gpu-check FAKE=1) rehearses the checks without one\n"
    assert not list(tmp_path.iterdir())


def test_a_check_that_hangs_is_ended(tmp_path: Path) -> None:
    """And the next one finds a process."""
    process = StandInProcess("cpu")
    for name in ("first", "second"):
        with pytest.raises(AssertionError, match="over its limit of 2 s"):
            process.run("sleeper", limit=2.0, beside=str(tmp_path / name))
        assert (tmp_path / f"{name}.0").exists()
    process.kill()


def test_host_syncs_beyond_the_budget_are_named() -> None:
    (file, text), (of_step, of_microbatch) = next(iter(HOST_SYNCS.items()))
    allowed = of_step + 2 * of_microbatch
    assert not over_budget([(file, f"x = {text}", "item", allowed), ("nemo_flashrl/ops/head.py", "x", "item", 6)], 2)
    assert over_budget([(file, text, "item", allowed + 1)], 2) == [
        f"{allowed + 1} at {file}: {text}, {allowed} allowed"
    ]
    assert over_budget([("megatron/new.py", "int(x)", "item", 1)], 2) == ["1 x item at megatron/new.py: int(x)"]
    assert over_budget([("nemo_flashrl/ops/head.py", "x", "item", 7)], 2) == ["7 at nemo_flashrl/ops/: , 6 allowed"]
