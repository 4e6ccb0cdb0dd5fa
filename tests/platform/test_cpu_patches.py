"""What is redirected on a CPU beyond what every run there needs."""

from __future__ import annotations

import pytest
import torch.utils.cpp_extension

from nemo_flashrl import platform


def test_nothing_is_compiled_for_a_gpu_that_is_not_there() -> None:
    """Megatron 0.15 does so when it is imported and lives with a RuntimeError; beside nvcc torch raises another."""
    platform.install()
    with pytest.raises(RuntimeError, match="nothing is compiled for a GPU"):
        torch.utils.cpp_extension.load_inline("any", [""], with_cuda=True)
