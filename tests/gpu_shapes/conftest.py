"""One fake GPU for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_cuda import compiler
from fake_gpu import FakeGpu


@pytest.fixture(scope="session")
def fake_gpu() -> Iterator[FakeGpu]:
    if compiler() is None:
        pytest.skip("no C++ compiler (c++, or what CXX names), which fake CUDA's device guard needs")
    gpu = FakeGpu()
    yield gpu
    gpu.close()
