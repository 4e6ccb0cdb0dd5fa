"""`flashrl doctor env`: what it refuses, what it only remarks on, and hosts beside each other."""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

from nemo_flashrl.cli import main
from nemo_flashrl.doctor import node
from nemo_flashrl.doctor.node import ACCEPTED, ON_GPUS, existing_parent, file_system, in_line

MOUNTS = "/dev/a / ext4 rw 0 0\nserver:/x /shared nfs4 rw 0 0\ntmpfs /shared/fast tmpfs rw 0 0\n"


def look(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, str]]:
    """Exit code, and name -> state of the lines."""
    code = main(["doctor", "env", *arguments])
    page = capsys.readouterr().out
    return code, {name.strip(): state for state, name in re.findall(r"^  (OK|WARN|FAIL) +(.{20})", page, re.M)}


def test_this_machine_is_fit_for_the_rehearsal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, states = look(capsys, "rehearsal", f"output={tmp_path / 'run'}")
    assert code == 0
    assert set(ACCEPTED) | set(ON_GPUS) | {"GPUs", "torch", "open files", "output"} <= set(states)
    assert list(tmp_path.iterdir()) == []
    assert look(capsys)[0] == 0


def test_a_job_for_gpus_is_refused_where_there_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    code, states = look(capsys, "llama3_70b", "cluster.gpus_per_node=64")
    assert code == 1
    assert states["GPUs"] == "FAIL"


def test_an_output_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    code, states = look(capsys, "rehearsal", "output=/proc/run")
    assert (code, states["output"]) == (1, "FAIL")


def test_a_disk_of_one_node_is_no_output_for_several(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    states = look(capsys, "rehearsal", f"output={tmp_path / 'run'}", "cluster.nodes=2")[1]
    assert states["output"] == "FAIL"


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        states = look(capsys, "rehearsal", f"rollout.servers=[http://localhost:{port}]", "rollout.engine=vllm")[1]
    assert states[f"port {port}"] == "WARN"


def test_a_variable_that_the_node_sets_otherwise(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    states = look(capsys, "llama3_70b")[1]
    assert states["NCCL_NVLS_ENABLE"] == "WARN"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in states  # as asked


def test_the_file_system_is_that_of_the_nearest_mount() -> None:
    assert file_system(Path("/shared/run"), MOUNTS) == "nfs4"
    assert file_system(Path("/shared/fast/run"), MOUNTS) == "tmpfs"
    assert file_system(Path("/sharedx"), MOUNTS) == "ext4"
    assert existing_parent(Path("/proc/none/at/all")) == Path("/proc")


def test_lines_of_releases() -> None:
    assert in_line("0.15.3", ["0.14", "0.15"])
    assert in_line("2.6", ["2.6"])
    assert not in_line("0.150.1", ["0.15"])


def test_the_table_in_the_docs() -> None:
    page = (ROOT / "docs" / "cluster.md").read_text()
    for name, lines in {**ACCEPTED, "transformer-engine": ON_GPUS["transformer-engine"][0]}.items():
        assert re.search(rf"^\| `{name}`.*\| {re.escape(', '.join(lines))} \|$", page, re.M), name


def test_a_release_that_this_package_is_not_written_for(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "installed", {"megatron-core": "0.14.2"}.get)
    main(["doctor", "env", "rehearsal"])
    page = capsys.readouterr().out
    assert re.search(r"WARN megatron-core +0.14.2; this package is written for 0.15 and 0.16\n", page)
    assert re.search(r"FAIL nemo_toolkit +not installed; this package is written for 2.6 and 2.7\n", page)


@pytest.mark.parametrize(("shift", "agrees"), [(0, True), (5, False)])
def test_hosts_beside_each_other(tmp_path: Path, shift: int, agrees: bool) -> None:
    """Two tasks of a step, the second with a clock that goes `shift` seconds ahead."""
    code = (
        "import sys, time; now, shift = time.time, int(sys.argv[2]); time.time = lambda: now() + shift\n"
        "from nemo_flashrl.doctor.hosts import compare_hosts\n"
        "for look in compare_hosts(sys.argv[1]): print(*look, sep='|')"
    )
    step = {
        "SLURM_JOB_ID": str(random.randrange(20000)),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NODEID": "0",
    }
    tasks = []
    for rank in ("0", "1"):
        environment = {**os.environ, **step, "SLURM_LOCALID": rank, "SLURM_PROCID": rank}
        command = [sys.executable, "-c", code, str(tmp_path / "run"), str(shift * int(rank))]
        tasks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    first, second = (task.communicate(timeout=200)[0].splitlines() for task in tasks)
    assert [line.split("|")[:2] for line in first] == [["rendezvous", "True"]]
    found = [line.split("|")[:2] for line in second]
    assert found == [["rendezvous", "True"], ["clock", str(agrees)], ["shared output", "True"]]
    assert list(tmp_path.iterdir()) == []
