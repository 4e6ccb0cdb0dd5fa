"""A rehearsal stays on the CPU where there are GPUs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from nemo_flashrl import platform
from nemo_flashrl.rehearsal import run


def test_a_rehearsal_hides_gpus(monkeypatch, tmp_path: Path) -> None:
    """From itself before anything is trained, and from the processes that inherit its environment."""

    def warm_start(*_) -> None:
        assert not platform.has_gpu() and os.environ["CUDA_VISIBLE_DEVICES"] == ""
        raise RuntimeError("reached")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: os.environ["CUDA_VISIBLE_DEVICES"] != "")
    monkeypatch.setattr(run, "make_warm_start", warm_start)
    platform.has_gpu.cache_clear()
    assert platform.has_gpu()
    try:
        with pytest.raises(RuntimeError, match="reached"):
            run.rehearse(run.Rehearsal(output=tmp_path / "rehearsal"))
    finally:
        platform.has_gpu.cache_clear()
