"""The job scripts on a real Slurm of three nodes on this machine: stub steps for what a job ends with, one real run."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from paths import ROOT
from real_server import SIZES, VOCAB, rollout_python
from tiny import write_model

from nemo_flashrl.rehearsal.warm_start import make_tokenizer, make_warm_start
from nemo_flashrl.run.jsonl import read_metrics

SCRIPTS = ROOT / "examples" / "slurm"
HERE = Path(__file__).parent
LOCK = Path("/tmp/flashrl-slurm.lock")  # one such cluster a machine, whichever session it is of
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "munge", "ip", "unshare")
ONE_OF_EACH_KIND = [
    "--gpus-per-node=1",
    "--ntasks-per-node=1",
    ":",
    "--nodes=2",
    "--ntasks-per-node=2",
    "--gpus-per-node=2",
]
ON_TWO_NODES = ["--nodes=2", "--gpus-per-node=2"]
SERVES = 'echo serving on $(hostname); touch "$OUT/serving"; exec sleep 300'
# Saves and ends with 75 at the first start, ends well at the second.
SAVES_ONCE = """
echo "rank $SLURM_PROCID of $SLURM_STEP_NUM_TASKS on $(hostname), start ${SLURM_RESTART_COUNT:-0}"
[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || exit 0
trap 'echo saved; exit 75' TERM
touch "$OUT/ready-$SLURM_PROCID"
for _ in $(seq 3000); do sleep 0.1; done
exit 99
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Three idle nodes, n1 to n3; gone afterwards whatever happened."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(
            f"a Slurm of its own needs root and {', '.join(missing or PROGRAMS)} (apt: slurm-wlm munge iproute2)"
        )
    folder = tmp_path_factory.mktemp("slurm")
    before = {name: os.environ.get(name) for name in ("SLURM_CONF", "PATH")}
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where `flashrl` is
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # names of bridge and namespaces are the machine's
        try:
            started = subprocess.run([HERE / "up.sh", folder], capture_output=True, text=True, timeout=300)
            if started.returncode != 0:
                pytest.skip(f"Slurm cannot be brought up here: {started.stderr.strip().splitlines()[-1:]}")
            yield folder
        finally:
            subprocess.run([HERE / "down.sh"], timeout=60)
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def takes_containers() -> bool:
    """Whether srun knows pyxis' options here: up.sh builds a stand-in where gcc and Slurm's headers are installed."""
    return Path(os.environ["SLURM_CONF"]).with_name("containers.so").exists()


def shown(job: str) -> dict[str, str]:
    """Slurm's record of a job; of its first group where it has two."""
    text = subprocess.run(["scontrol", "show", "job", "-o", job], capture_output=True, text=True).stdout
    return dict(re.findall(r"(\w+)=(\S*)", text.splitlines()[0]))


class Job:
    """A submitted job script whose two steps run these bash lines."""

    def __init__(
        self, folder: Path, script: str, options: list[str], servers: str, trainer: str, *settings: str
    ) -> None:
        self.folder = folder
        image = "image" if takes_containers() else ""  # pyxis' options too, where they are known
        for step, body in (("serve", servers), ("train", trainer)):
            (folder / step).write_text(f"#!/usr/bin/env bash\n{body}\n")
            (folder / step).chmod(0o755)
        environment = {
            **os.environ,
            "OUT": str(folder),
            "FLASHRL_SLURM": str(SCRIPTS),
            "FLASHRL_SERVE": str(folder / "serve"),
            "FLASHRL_TRAIN": str(folder / "train"),
            "FLASHRL_TRAINERS_PER_NODE": "2",
            "FLASHRL_SERVERS_PER_NODE": "1",
            **{"FLASHRL_IMAGE": image, "FLASHRL_ROLLOUT_IMAGE": image, "FLASHRL_MOUNTS": f"{folder}:/nemo_run"},
        }
        command = [
            "sbatch",
            "--parsable",
            *options,
            str(SCRIPTS / f"{script}.sbatch"),
            "rehearsal",
            str(folder / "run"),
            *settings,
        ]
        self.id = subprocess.run(
            command, cwd=folder, env=environment, check=True, capture_output=True, text=True
        ).stdout.strip()

    def shown(self) -> dict[str, str]:
        return shown(self.id)

    def wait_for(self, *files: str) -> None:
        def there() -> bool:
            assert self.shown()["JobState"] in ("PENDING", "RUNNING", "CONFIGURING"), self.said()
            return all((self.folder / file).exists() for file in files)

        _until(there, self)

    def end(self, seconds: float = 240) -> dict[str, str]:
        def ended() -> bool:
            state = self.shown()["JobState"]
            if state == "PENDING":
                # Jobs of two groups are started by backfilling, which rests until any job changes: on this idle
                # cluster, for minutes after a requeued job may run.
                subprocess.run(["scontrol", "update", f"JobId={self.id}", "Comment=waiting"], capture_output=True)
            return state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")

        _until(ended, self, seconds)
        return self.shown()

    def said(self) -> str:
        """What the job script itself has said."""
        return "".join(path.read_text() for path in self.folder.glob("*.log"))

    def logs(self) -> dict[str, str]:
        """Name without the job's number -> text."""
        found = sorted((self.folder / "run-logs").glob("*.log"))
        return {path.name.replace(f"-{self.id}", "", 1): _said(path) for path in found}


def _said(log: Path) -> str:
    """A step's own words, without Slurm's and the shell's about its end."""
    others = ("slurmstepd", "srun", "Terminated")
    return "".join(line for line in log.read_text().splitlines(True) if not line.startswith(others))


def _until(holds: Callable[[], bool], job: Job | None = None, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, job and f"{job.shown()}\n{job.said()}"
        time.sleep(0.2)


def test_groups_run_on_nodes_of_their_own(cluster: Path, tmp_path: Path) -> None:
    ends = 'until [ -e "$OUT/serving" ]; do sleep 0.1; done; echo "$SLURM_PROCID on $(hostname)"'
    job = Job(tmp_path, "heterogeneous", ONE_OF_EACH_KIND, SERVES, ends)
    assert job.end()["ExitCode"] == "0:0", job.said()
    assert job.logs() == {
        "servers-0.log": "serving on n1\n",
        "trainer-0.log": "0 on n2\n",
        "trainer-1.log": "1 on n2\n",
        "trainer-2.log": "2 on n3\n",
        "trainer-3.log": "3 on n3\n",
    }


def test_dead_servers_fail_the_job(cluster: Path, tmp_path: Path) -> None:
    """The trainer is asked to save first; its 75 must not requeue the job."""
    dies = 'until [ -e "$OUT/ready-3" ]; do sleep 0.1; done; exit 3'
    job = Job(tmp_path, "heterogeneous", ONE_OF_EACH_KIND, dies, SAVES_ONCE)
    ended = job.end()
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "3:0", "0")
    assert "saved" in job.logs()["trainer-0.log"]


def test_a_failing_rank_fails_the_job(cluster: Path, tmp_path: Path) -> None:
    job = Job(tmp_path, "colocated", ON_TWO_NODES, SERVES, "[ $SLURM_PROCID = 3 ] && exit 7; exit 0")
    ended = job.end()
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "7:0")


def test_the_time_limits_warning_saves_and_requeues(cluster: Path, tmp_path: Path) -> None:
    """Slurm warns up to a minute early: with a limit of one minute, soon after the start."""
    limits = ["--time=1", "--signal=B:USR1@30"]
    job = Job(tmp_path, "heterogeneous", [*limits, *ONE_OF_EACH_KIND], SERVES, SAVES_ONCE)
    ended = job.end()
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1")
    first, second = (f"rank 0 of 4 on n2, start {n}" for n in (0, 1))
    assert job.logs()["trainer-0.log"].splitlines() == [first, "saved", second]


def test_a_preempted_job_goes_on(cluster: Path, tmp_path: Path) -> None:
    job = Job(tmp_path, "colocated", ON_TWO_NODES, SERVES, SAVES_ONCE)
    job.wait_for("serving", *(f"ready-{rank}" for rank in range(4)))
    subprocess.run(["scancel", "--batch", "--signal=USR1", job.id], check=True)
    ended = job.end()
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1")
    assert job.logs()["trainer-3.log"].splitlines()[1:] == ["saved", "rank 3 of 4 on n2, start 1"]


def test_a_run_over_three_hosts(cluster: Path, tmp_path: Path) -> None:
    """A vLLM server on a node of its own; tensor parallel inside two others, pipeline stages across."""
    python = rollout_python()
    if python is None:
        pytest.skip("no vLLM: `make rollout-venv` installs it")
    make_tokenizer().save_pretrained(write_model(tmp_path / "model", vocab_size=VOCAB, **SIZES))
    sizes = ["parallel.tensor=2", "parallel.pipeline=2", "rollout.batch_size=8", "trainer.steps=2"]
    settings = [f"model.path={tmp_path / 'model'}", "rollout.server_timeout=600", *sizes]
    serve, train = f'exec env -u PYTHONPATH "{python.with_name("flashrl")}" "$@"', 'exec flashrl "$@"'
    job = Job(tmp_path, "heterogeneous", ONE_OF_EACH_KIND, serve, train, "rollout=streaming", *settings)
    ended = job.end(seconds=900)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), job.said() + str(job.logs())[-4000:]
    assert [metrics["step"] for metrics in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    assert (tmp_path / "run" / "checkpoint" / "model.safetensors").is_file()
    served = job.logs()["servers-0.log"]
    assert served.count('POST /update_weights HTTP/1.1" 200') >= 2  # the first weights, and those of step 1


RUN = """
defaults:
  - /experiment/rehearsal@_global_
  - _self_
output: {folder}/run
model: {{path: {folder}/model}}
cluster: {{nodes: 2, gpus_per_node: 1}}
parallel: {{pipeline: 2}}
rollout: {{batch_size: 8}}
trainer: {{steps: 1}}
"""


def test_nemo_run_submits_a_job_over_two_hosts(cluster: Path, tmp_path: Path) -> None:
    """`nemo flashrl submit`, a real SlurmExecutor, and its job to the exported checkpoint."""
    pytest.importorskip("nemo_run")
    if not takes_containers():
        pytest.skip("NeMo-Run's jobs ask for pyxis; its stand-in is built with gcc libc6-dev libslurm-dev (apt)")
    make_warm_start(tmp_path / "model", steps=0)
    (tmp_path / "my_run.yaml").write_text(RUN.format(folder=tmp_path))
    submitted = subprocess.run(
        ["nemo", "flashrl", "submit", "config=my_run.yaml", "account=team", "time=00:20:00", "--yes"],
        cwd=tmp_path,
        env={**os.environ, "NEMORUN_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    (number,) = re.findall(r"Job id: (\d+)", submitted.stdout) or [pytest.fail(submitted.stdout + submitted.stderr)]
    _until(lambda: shown(number)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), seconds=500)
    said = "".join(log.read_text() for log in (tmp_path / "home").rglob("log*.out"))
    ended = shown(number)
    assert (ended["JobState"], ended["ExitCode"], ended["NumNodes"]) == ("COMPLETED", "0:0", "2"), said[-4000:]
    assert [metrics["step"] for metrics in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1]
    assert (tmp_path / "run" / "checkpoint" / "model.safetensors").is_file()
