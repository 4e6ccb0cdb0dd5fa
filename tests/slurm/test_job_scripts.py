"""The job scripts without a cluster: what the job ends with, whichever of its two steps ends first; and linters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

SCRIPTS = ROOT / "examples" / "slurm"
JOBS = ["heterogeneous", "colocated"]
# Slurm's commands, as far as the scripts use them. A step is a process, its signal a signal to that process.
STUBS = {
    "srun": 'for a in "$@"; do case $a in --job-name=*) step=${a#*=};; esac; done\n'
    'echo $$ >"$STUB/$step.pid"; echo "$@" >"$STUB/$step.arguments"; exec bash "$STUB/$step"',
    "squeue": "echo '7.0 servers'; echo '7.1 trainer'",
    "scancel": 'echo "$@" >>"$STUB/scancelled"; [ "$2" = 7.1 ] && kill -TERM "$(cat "$STUB/trainer.pid")"',
    "scontrol": 'if [ "$1" = requeue ]; then echo "$2" >>"$STUB/requeued"; else echo node1; echo node2; fi',
}
WAITS = 'trap "exit 75" TERM; touch "$STUB/ready"; for _ in $(seq 600); do sleep 0.1; done; exit 99'
SERVES = (
    'trap "touch $STUB/servers.ended; exit 0" TERM; touch "$STUB/serving"; '
    "for _ in $(seq 600); do sleep 0.1; done; exit 99"
)
TRAINER_IS_UP, SERVERS_ARE_UP = (f'until [ -e "$STUB/{sign}" ]; do sleep 0.1; done; ' for sign in ("ready", "serving"))


@pytest.fixture
def start(tmp_path: Path) -> Any:
    """start(job, servers=, trainer=): the job script with these commands as its steps."""
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)

    def run(job: str, *, servers: str, trainer: str) -> subprocess.Popen[str]:
        (tmp_path / "servers").write_text(servers)
        (tmp_path / "trainer").write_text(trainer)
        environment = {
            **os.environ,
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "STUB": str(tmp_path),
            "FLASHRL_SLURM": str(SCRIPTS),
            "FLASHRL_SERVERS_PER_NODE": "2",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_JOB_NODELIST_HET_GROUP_0": "node[1-2]",
        }
        command = ["bash", str(SCRIPTS / f"{job}.sbatch"), "rehearsal", str(tmp_path / "out dir" / "run"), "a.b=c d"]
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    return run


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("code", [0, 7])
def test_the_job_ends_with_the_trainers_code_and_without_servers(
    start: Any, tmp_path: Path, job: str, code: int
) -> None:
    process = start(job, servers=SERVES, trainer=f"{SERVERS_ARE_UP}exit {code}")
    assert process.wait(60) == code, process.stderr.read()
    assert (tmp_path / "servers.ended").exists()
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize(("servers", "code"), [("exit 3", 3), ("exit 0", 1)])
def test_dead_servers_end_the_trainer_and_fail_the_job(
    start: Any, tmp_path: Path, job: str, servers: str, code: int
) -> None:
    """The trainer saves and ends with 75; the job must neither succeed nor be requeued into the same failure."""
    process = start(job, servers=TRAINER_IS_UP + servers, trainer=WAITS)
    assert process.wait(60) == code, process.stderr.read()
    assert (tmp_path / "scancelled").read_text() == "--signal=TERM 7.1\n"
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_warning_is_a_checkpoint_and_a_requeue(start: Any, tmp_path: Path, job: str, number: signal.Signals) -> None:
    process = start(job, servers=SERVES, trainer=WAITS)
    while not ((tmp_path / "ready").exists() and (tmp_path / "serving").exists()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(60) == 75, process.stderr.read()
    assert (tmp_path / "requeued").read_text() == "7\n"
    assert (tmp_path / "servers.ended").exists()


@pytest.mark.parametrize("job", JOBS)
def test_what_the_steps_are_told(start: Any, tmp_path: Path, job: str) -> None:
    """Two servers on each of two nodes; an argument with a blank stays one."""
    process = start(job, servers=SERVES, trainer=f"{SERVERS_ARE_UP}exit 0")
    assert process.wait(60) == 0, process.stderr.read()
    urls = "http://node1:8000,http://node1:8001,http://node2:8000,http://node2:8001"
    for step in ("servers", "trainer"):
        told = (tmp_path / f"{step}.arguments").read_text()
        assert f"rollout.servers=[{urls}]" in told
        assert f"output={tmp_path}/out dir/run " in told
        assert "a.b=c d" in told
    assert "--kill-on-bad-exit=0" in (tmp_path / "trainer.arguments").read_text()


def tracked(*patterns: str) -> list[str]:
    found = [path for pattern in patterns for path in ROOT.glob(pattern)]
    return sorted(str(path.relative_to(ROOT)) for path in found)


LINTERS = {
    "shellcheck": ["-x", *tracked("examples/slurm/*", "docker/*.sh", "tests/slurm/*.sh", ".ci/run")],
    "hadolint": tracked("docker/Dockerfile*"),
    "yamllint": ["--strict", "conf", *tracked(".github/workflows/*.yml")],
}


@pytest.mark.parametrize("linter", LINTERS)
def test_lint(linter: str) -> None:
    program = Path(sys.executable).with_name(linter)
    result = subprocess.run([program, *LINTERS[linter]], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
