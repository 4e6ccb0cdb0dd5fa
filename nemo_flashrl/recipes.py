"""NeMo-Run's way in: `nemo flashrl train ...`, `submit ...` and `rehearse`, and an executor for a Slurm cluster.

nemo flashrl train config=my_run.yaml overrides='["trainer.steps=10"]' --yes
nemo flashrl submit config=my_run.yaml account=team container_image=nemo-flashrl --yes

import nemo_run as run
from nemo_flashrl.recipes import slurm_executor, training
recipe = training("my_run.yaml", ["trainer.steps=10"])            # a run.Partial
run.run(recipe, executor=slurm_executor("my_run.yaml", account="team", container_image="nemo-flashrl"))
"""

# Annotations are real types here, not text, and Optional is spelt out: NeMo-Run parses its arguments by them.
import os
from pathlib import Path
from typing import Any, Optional

import nemo_run as run

from nemo_flashrl import cli
from nemo_flashrl import config as configuration
from nemo_flashrl.preflight.admission import admit


@run.cli.entrypoint(namespace="flashrl")
def train(config: str, overrides: Optional[list[str]] = None) -> None:  # noqa: UP045
    """Train by a configuration: a YAML file, or the name of one under conf/experiment."""
    _command("train", config, *(overrides or []))


@run.cli.entrypoint(namespace="flashrl")
def rehearse(overrides: Optional[list[str]] = None) -> None:  # noqa: UP045
    """The whole path, small and real, on this machine's CPU."""
    _command("rehearse", *(overrides or []))


@run.cli.entrypoint(namespace="flashrl")
def submit(
    config: str,
    account: str,
    container_image: Optional[str] = None,  # noqa: UP045
    container_mounts: Optional[list[str]] = None,  # noqa: UP045
    partition: Optional[str] = None,  # noqa: UP045
    time: str = "1-00:00:00",
    overrides: Optional[list[str]] = None,  # noqa: UP045
) -> None:
    """Train by a configuration as a Slurm job, from a login node; nodes and GPUs are those of its `cluster`."""
    if Path(config).expanduser().is_file():
        config = str(Path(config).expanduser().resolve())  # the job starts in a folder of NeMo-Run's
    recipe = training(config, overrides)
    executor = slurm_executor(
        config,
        account=account,
        container_image=container_image,
        container_mounts=container_mounts,
        partition=partition,
        time=time,
        overrides=overrides,
    )
    run.run(recipe, executor=executor, name=f"flashrl-{Path(config).stem}", detach=True)


def _command(*arguments: str) -> None:
    code = cli.main(arguments)
    if code:
        raise SystemExit(code)


def training(config: str, overrides: list[str] | None = None) -> run.Partial:
    """The recipe of a configuration; what is none, or could not run or fit, is refused before anything is submitted.

    Raises ValueError with field, value and remedy.
    """
    admit(configuration.load(config, overrides))
    return run.Partial(train, config=config, overrides=overrides)


def slurm_executor(
    config: str,
    *,
    account: str,
    container_image: str | None = None,
    container_mounts: list[str] | None = None,
    partition: str | None = None,
    time: str = "1-00:00:00",
    tunnel: run.LocalTunnel | run.SSHTunnel | None = None,
    packager: run.Packager | None = None,
    overrides: list[str] | None = None,
    **options: Any,
) -> run.SlurmExecutor:
    """Nodes and GPUs as the configuration's `cluster` says, one task a GPU (`launch/processes.py` makes them ranks).

    Args:
        tunnel: how the cluster is reached; None: this machine is a login node. NeMo-Run keeps a local tunnel's jobs
            under $NEMORUN_HOME/experiments, and finds them nowhere else.
        packager: what of this machine's code travels; None: nothing, as the image or the nodes have this package.
        options: further fields of run.SlurmExecutor.

    Raises:
        ValueError: `cluster.gpus_per_node` and `cluster.nodes` are not set.
    """
    cluster = configuration.load(config, overrides).cluster
    home = Path(os.environ.get("NEMORUN_HOME", Path.home() / ".nemo_run"))
    return run.SlurmExecutor(
        account=account,
        partition=partition,
        time=time,
        nodes=cluster.nodes,
        ntasks_per_node=max(1, cluster.gpus_per_node),
        gpus_per_node=cluster.gpus_per_node or None,
        container_image=container_image,
        container_mounts=container_mounts or [],
        env_vars=dict(cluster.environment),
        packager=packager or run.Packager(),
        tunnel=tunnel or run.LocalTunnel(job_dir=str(home / "experiments")),
        **options,
    )
