"""A rank that `srun` started directly, one task per device, told what torchrun would have told it."""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping

FIRST_PORT, NUM_PORTS = 20000, 20000  # below the range that Linux hands out by itself


def adopt_tasks(environment: MutableMapping[str, str] = os.environ) -> None:
    """Fill in RANK, WORLD_SIZE, MASTER_ADDR and their like from Slurm's variables.

    Nothing happens under torchrun, whose variables are there already, outside Slurm, or in a step of one task.

    Raises:
        ValueError: nodes run different numbers of tasks, which no parallel layout of ours can use.
    """
    if "RANK" in environment or int(environment.get("SLURM_STEP_NUM_TASKS", "1")) == 1:
        return
    per_node = tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
    if len(set(per_node)) != 1:
        raise ValueError(
            f"SLURM_STEP_TASKS_PER_NODE={environment['SLURM_STEP_TASKS_PER_NODE']!r}: every node must run the same "
            "number of tasks; set --ntasks-per-node"
        )
    # Of the step, not of the job: a heterogeneous job runs a step per group. A requeued job keeps its id and port.
    port = FIRST_PORT + int(environment["SLURM_JOB_ID"]) % NUM_PORTS
    environment.update(
        RANK=environment["SLURM_PROCID"],
        WORLD_SIZE=environment["SLURM_STEP_NUM_TASKS"],
        LOCAL_RANK=environment["SLURM_LOCALID"],
        LOCAL_WORLD_SIZE=str(per_node[0]),
        GROUP_RANK=environment["SLURM_NODEID"],
        MASTER_ADDR=hosts(environment["SLURM_STEP_NODELIST"])[0],
        TORCHELASTIC_RUN_ID=environment["SLURM_JOB_ID"],
    )
    environment.setdefault("MASTER_PORT", str(port))


def tasks_per_node(text: str) -> list[int]:
    """
    >>> tasks_per_node("8(x2),4")
    [8, 8, 4]
    """
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in found for _ in range(int(times or 1))]


def hosts(nodelist: str) -> list[str]:
    """Slurm's compressed list of host names, written out (`scontrol` is not there inside a container).

    >>> hosts("gpu[007-009,020],cpu1")
    ['gpu007', 'gpu008', 'gpu009', 'gpu020', 'cpu1']
    """
    return [name for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist) for name in _expanded(part)]


def _expanded(part: str) -> list[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    ranges, _, after = rest.partition("]")
    numbers = []
    for item in ranges.split(","):
        first, _, last = item.partition("-")
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1)]
    return [before + number + tail for number in numbers for tail in _expanded(after)]
