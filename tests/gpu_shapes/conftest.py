"""A fake GPU for the tests of this folder, and Transformer Engine's stand-in on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_cuda import compiler
from stand_in_process import StandInProcess


@pytest.fixture(scope="session")
def fake_gpu() -> Iterator[StandInProcess]:
    if compiler() is None:
        pytest.skip("no C++ compiler (c++, or what CXX names), which fake CUDA's device guard needs")
    process = StandInProcess("cuda")
    yield process
    process.close()


@pytest.fixture(scope="session")
def stand_in() -> Iterator[StandInProcess]:
    process = StandInProcess("cpu")
    yield process
    process.close()
