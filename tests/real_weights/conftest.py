"""The model, once a session."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_models import write_smollm2


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct in fp32, to be read alone."""
    return write_smollm2(tmp_path_factory.mktemp("smollm2") / "model")
