"""Weights & Biases gets what `metrics.jsonl` has, under one id; the folder names the software of each start."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_ranks

from nemo_flashrl.rehearsal.warm_start import make_warm_start
from nemo_flashrl.run.jsonl import read_json_lines

BLOCK, HEADER = 32768, 7  # bytes
WHOLE, FIRST, LAST = 1, 2, 4  # kinds of a record's parts


def offline_history(run: Path) -> list[dict[str, Any]]:
    """The steps in the only offline run under `run`: protobuf records in the blocks of a LevelDB log."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = run.glob("wandb/offline-run-*/run-*.wandb")
    data, at, record, steps = file.read_bytes(), 7, b"", []  # behind the file's own header
    while at < len(data):
        if BLOCK - at % BLOCK < HEADER:  # no record begins in what is left of a block
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack_from("<4xHB", data, at)
        part = data[at + HEADER : at + HEADER + length]
        record, at = (part if kind in (WHOLE, FIRST) else record + part), at + HEADER + length
        if kind in (WHOLE, LAST) and (history := Record.FromString(record).history.item):
            steps.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in history})
    return steps


def test_offline_run_has_the_same_values(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    model = make_warm_start(tmp_path / "model", steps=0)
    settings = [f"output={tmp_path / 'run'}", f"model.path={model}", "trainer.steps=2", "rollout.batch_size=4"]
    offline = ["trainer.wandb_project=tests", "cluster.environment.WANDB_MODE=offline"]
    run_ranks(
        1, "command", tmp_path, "train", "rehearsal", *settings, *offline, "+cluster.environment.WANDB_SILENT=true"
    )
    logged = offline_history(tmp_path / "run")
    written = list(read_json_lines(tmp_path / "run/metrics.jsonl"))
    assert len(logged) == len(written) == 2
    for sent, line in zip(logged, written, strict=True):
        numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
        assert len(numbers) > 60
        assert {name: sent[name] for name in numbers} == pytest.approx(numbers)
    again = [*settings, "trainer.steps=3"]
    run_ranks(1, "command", tmp_path, "train", "rehearsal", *again, *offline, "+cluster.environment.WANDB_SILENT=true")
    starts = [path.name.rpartition("-")[2] for path in (tmp_path / "run").glob("wandb/offline-run-*")]
    assert starts == [(tmp_path / "run/wandb_run_id").read_text().strip()] * 2
    (versions,) = json.loads((tmp_path / "run/versions.json").read_text())  # of both starts
    assert versions["after_step"] == 0 and versions["torch"] == torch.__version__
    assert {"python", "nemo_flashrl", "nemo-toolkit", "megatron-core", "transformers"} <= versions.keys()


CHECK = """
import json, os, sys
from nemo_flashrl.preflight.prepare import check_wandb
for number, given in enumerate(json.loads(sys.argv[1])):
    if (child := os.fork()) == 0:
        os.environ.update(given)
        try:
            check_wandb("tests")
            said = "nothing"
        except ValueError as error:
            said = str(error)
        with open(f"{number}", "w") as file:
            file.write(said)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_a_project_without_a_login_is_refused(tmp_path: Path) -> None:
    """Each in a fork of its own, of a process that never imported wandb, which takes hold of the one that does."""
    pytest.importorskip("wandb", reason="wandb is not installed")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "NETRC"))}
    cases = (
        ({}, "trainer.wandb_project='tests': no login for https://"),
        ({"WANDB_API_KEY": "short"}, "trainer.wandb_project='tests': wandb says: WANDB_API_KEY invalid"),
        ({"WANDB_MODE": "of"}, "trainer.wandb_project='tests': wandb says: 1 validation error"),
        ({"WANDB_API_KEY": "0" * 40}, "nothing"),
        ({"WANDB_MODE": "offline"}, "nothing"),
        ({"RANK": "1"}, "nothing"),
    )
    done = subprocess.run(
        [sys.executable, "-c", CHECK, json.dumps([given for given, _ in cases])],
        env={**plain, "HOME": str(tmp_path), "WANDB_BASE_URL": "https://127.0.0.1:9"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    for number, (_, words) in enumerate(cases):
        assert (tmp_path / str(number)).read_text().startswith(words), done.stderr
