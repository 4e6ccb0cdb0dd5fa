"""Checks on a GPU, each in a process of its own with a time limit, and the JSON that they are written to.

    python -m pytest --confcutdir tests/gpu tests/gpu               all of them, where there is a GPU; else skipped
    python tests/gpu/check.py [--quick] [--fake] [--report FILE]    the same with the JSON: `make gpu-check`

With --fake the same code runs on fake CUDA (tests/helpers/fake_cuda.py): shapes, devices and bytes are true, no number
has a value and no time is measured, so `is_real` stands before what looks at either.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "helpers"), str(Path(__file__).parents[2])]

import pytest  # noqa: E402
import torch  # noqa: E402
from fake_cuda import compiler  # noqa: E402
from gpu_checks import Check, Gpu, Report  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="smaller sizes")
    parser.addoption("--fake", action="store_true", help="on fake CUDA: no values, no times")
    parser.addoption("--report", help="JSON file to write")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--report", None):
        config.pluginmanager.register(Report(config), "gpu-report")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    is_fake = request.config.getoption("--fake", False)
    if not is_fake and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; none is here")
    if is_fake and compiler() is None:
        pytest.skip("no C++ compiler (c++, or what CXX names), which fake CUDA's device guard needs")
    gpu = Gpu(is_real=not is_fake, is_quick=request.config.getoption("--quick", False))
    yield gpu
    gpu.close()


@pytest.fixture
def gpu(device: Gpu, request: pytest.FixtureRequest) -> Check:
    measured: dict = {}
    request.node.user_properties.append(("measured", measured))
    return Check(device, measured)
