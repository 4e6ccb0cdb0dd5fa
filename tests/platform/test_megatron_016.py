"""megatron-core 0.16 under NeMo 2.7, through its shim: the same loss and gradients as 0.15."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paths import HELPERS
from processes import run_ranks
from tiny import random_trajectories, write_model

MEGATRON_016 = Path(sys.prefix) / "megatron-0.16"
VOCAB_SIZE = 131


@pytest.mark.skipif(not MEGATRON_016.is_dir(), reason=f"`make setup` puts megatron-core 0.16 in {MEGATRON_016}")
def test_one_step_equals_that_of_015(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", vocab_size=VOCAB_SIZE)
    (tmp_path / "trajectories.pkl").write_bytes(pickle.dumps(random_trajectories(6, VOCAB_SIZE)))
    arguments = (folder, tmp_path / "trajectories.pkl")
    run_ranks(1, "parity", *arguments, tmp_path / "old.pt", VOCAB_SIZE, gate=False)
    done = subprocess.run(
        [sys.executable, str(HELPERS / "workers" / "alone.py"), *map(str, arguments), str(tmp_path / "new.pt")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(MEGATRON_016), str(HELPERS)])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "megatron-core 0.16" in done.stdout
    old, new = torch.load(tmp_path / "old.pt"), torch.load(tmp_path / "new.pt")
    assert new["stats"]["loss"] == pytest.approx(old["stats"]["loss"], rel=1e-6)
    for name, expected in old["gradients"].items():
        assert (new["gradients"][name] - expected).norm() < 1e-5 * expected.norm(), name
