"""Slurm's variables -> torchrun's, and what is refused."""

from __future__ import annotations

import pytest

from nemo_flashrl.launch.processes import adopt_tasks, hosts, tasks_per_node

TASK = {
    "SLURM_JOB_ID": "41234",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_STEP_NODELIST": "node[03-04]",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "2",
    "SLURM_PROCID": "10",
}


def test_a_task_becomes_a_rank() -> None:
    environment = dict(TASK)
    adopt_tasks(environment)
    added = {name: value for name, value in environment.items() if name not in TASK}
    assert added == {
        "RANK": "10",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "8",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "node03",
        "MASTER_PORT": "21234",  # 20000 + 41234 % 20000: a requeued job meets at the same place
        "TORCHELASTIC_RUN_ID": "41234",
    }


@pytest.mark.parametrize("change", [{"RANK": "0"}, {"SLURM_STEP_NUM_TASKS": "1"}])
def test_torchrun_and_single_tasks_are_left_alone(change: dict[str, str]) -> None:
    environment = {**TASK, **change}
    adopt_tasks(environment)
    assert environment == {**TASK, **change}


def test_outside_slurm_nothing_is_set() -> None:
    environment: dict[str, str] = {}
    adopt_tasks(environment)
    assert environment == {}


def test_uneven_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"SLURM_STEP_TASKS_PER_NODE='8,4': .*--ntasks-per-node"):
        adopt_tasks({**TASK, "SLURM_STEP_TASKS_PER_NODE": "8,4"})


@pytest.mark.parametrize(
    ("nodelist", "names"),
    [
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("gpu[007-009,020],cpu1", ["gpu007", "gpu008", "gpu009", "gpu020", "cpu1"]),
        ("a[1,3]-ib", ["a1-ib", "a3-ib"]),
        ("r[1-2]n[09-10]", ["r1n09", "r1n10", "r2n09", "r2n10"]),
    ],
)
def test_hosts(nodelist: str, names: list[str]) -> None:
    assert hosts(nodelist) == names


def test_tasks_per_node() -> None:
    assert tasks_per_node("8(x2),4") == [8, 8, 4]
    assert tasks_per_node("1") == [1]
