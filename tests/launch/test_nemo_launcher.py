"""The NeMo Framework Launcher: our job files through its schema, and what stands behind the scripts that it starts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize
from launcher_rendering import GOLDEN, jobs, overrides, render
from omegaconf import OmegaConf
from paths import ROOT

from nemo_flashrl.config import conf_folder, load
from nemo_flashrl.launch import nemo_launcher
from nemo_flashrl.launch.nemo_launcher import key_values, read_result, serve, serve_arguments, train, train_arguments

NAMES = [job.split("/")[1] for stage, job in jobs() if stage == "rlhf_ppo"]
STARTED = "/opt/NeMo-Aligner/examples/nlp/gpt/"
COLOCATED = "/opt/NeMo/examples/nlp/language_modeling/megatron_gpt_pretraining.py"
DIE = "exit 9"
WAIT = "exec sleep 60"


def golden(stage: str, job: str) -> dict[str, str]:
    return {file.name: file.read_text() for file in (GOLDEN / stage / job.split("/")[1]).iterdir()}


def block(name: str, kind: str) -> dict[str, Any]:
    return yaml.safe_load((GOLDEN / "rlhf_ppo" / name / f"{kind}.yaml").read_text())


@pytest.mark.parametrize(("stage", "job"), jobs(), ids=lambda value: str(value))
def test_our_job_files_are_found_and_compose_to_the_golden_blocks(stage: str, job: str) -> None:
    OmegaConf.register_new_resolver("divide_floor", lambda x, y: x // y, replace=True)  # the launcher's own
    with initialize(config_path=None, version_base="1.2"):
        composed = compose(overrides=[f"+{stage}={job}", "+base_results_dir=/results", *overrides(stage)])
    blocks = OmegaConf.to_container(composed[stage], resolve=True)
    texts = golden(stage, job)
    if stage == "training":
        assert blocks | {"run": None} == yaml.safe_load(texts["block.yaml"]) | {"run": None}
    else:
        assert blocks["actor"] == yaml.safe_load(texts["actor.yaml"])
        assert blocks["critic"] == yaml.safe_load(texts["critic.yaml"])


@pytest.mark.parametrize(("stage", "job"), jobs(), ids=lambda value: str(value))
def test_golden_scripts_start_what_the_image_holds(stage: str, job: str) -> None:
    scripts = re.findall(r"python3 -u (\S+)", golden(stage, job)["submission.sh"])
    if stage == "training":
        assert scripts == [COLOCATED]
        assert (ROOT / "docker" / "launcher" / Path(COLOCATED).name).is_file()
    else:
        assert scripts == [f"{STARTED}serve_ppo_critic.py", f"{STARTED}train_gpt_ppo_actor.py"]
        assert all((ROOT / "docker" / "launcher" / Path(script).name).is_file() for script in scripts)


@pytest.mark.skipif("FLASHRL_NEMO_LAUNCHER" not in os.environ, reason="FLASHRL_NEMO_LAUNCHER names no checkout")
@pytest.mark.parametrize(("stage", "job"), jobs(), ids=lambda value: str(value))
def test_the_launcher_renders_the_golden_files(stage: str, job: str) -> None:
    assert render(stage, job) == golden(stage, job)


def test_every_experiment_on_whole_nodes_has_a_job_file() -> None:
    names = [path.stem for path in (conf_folder() / "experiment").glob("*.yaml")]
    nodes = {name for name in names if load(name, ["output=x", "model.path=x"]).cluster.gpus_per_node > 1}
    assert nodes | {"rehearsal"} == set(NAMES)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"rehearsal"}))
def test_a_job_has_its_experiments_sizes(name: str) -> None:
    """What a user asks for by name is what runs: the launcher's sizes replace the experiment's own with equal ones."""
    own = load(name, ["output=x", "model.path=x"])
    _, config, *settings = train_arguments(block(name, "actor"), "sampler[1-2]")
    job = load(config, settings)
    assert job.parallel == own.parallel
    assert job.cluster == own.cluster
    servers = block(name, "critic")
    of_a_node = servers["trainer"]["devices"] // servers["model"]["tensor_model_parallel_size"]
    assert len(job.rollout.servers) == 2 * of_a_node


def test_blocks_become_commands() -> None:
    """Two servers of four GPUs on each node of two; the names of the nodes come from Slurm."""
    actor, critic = block("llama3_70b", "actor"), block("llama3_70b", "critic")
    output = "/results/flashrl_llama3_70b/run"
    assert train_arguments(actor, "n[7-8]") == [
        "train",
        "llama3_70b",
        f"output={output}",
        "parallel.tensor=8",
        "parallel.pipeline=4",
        "parallel.context=1",
        "cluster.nodes=4",
        "cluster.gpus_per_node=8",
        "rollout.engine=vllm",
        "rollout.servers=[http://n7:8000,http://n7:8001,http://n8:8000,http://n8:8001]",
        f"rollout.weights_folder={output}-weights",
        'model.path="/models/policy"',
    ]
    assert serve_arguments(critic) == [
        *["serve-rollout", "llama3_70b", f"output={output}", f"rollout.weights_folder={output}-weights"],
        *['model.path="/models/policy"', "--host", "0.0.0.0", "--port", "8000", "--servers", "2"],
        *["--tensor-parallel", "4"],
    ]


def test_one_group_has_no_servers() -> None:
    alone = yaml.safe_load((GOLDEN / "training" / "flashrl_rehearsal" / "block.yaml").read_text())
    assert not [argument for argument in train_arguments(alone, None) if argument.startswith("rollout.")]
    assert not [argument for argument in train_arguments(alone, None) if argument.startswith("cluster.")]  # on CPUs


def test_settings_are_quoted_for_hydra() -> None:
    settings = {"rollout": {"stop": [")", "a,b"], "lag": 0}, "model": {"path": "/m=1"}, "reference": {"mode": None}}
    assert key_values(settings) == [
        'rollout.stop=[")", "a,b"]',
        "rollout.lag=0",
        'model.path="/m=1"',
        "reference.mode=null",
    ]


@pytest.mark.parametrize(
    "text",
    ["/models/千问", "C:\\models\\new", "ends in \\", "a\tb", 'say "x"', 'back\\"quote', "it's", "a=b,c", "é\u2028"],
)
def test_a_text_arrives_as_it_is(text: str, tmp_path: Path) -> None:
    """From the launcher's file and from what it appends, through both command lines, to the configuration."""
    values = block("rehearsal", "actor")
    values["flashrl"]["output"] = f"/results/{text}"
    values["flashrl"]["settings"] = {"model": {"path": "other"}, "rollout": {"stop": [text, "b"]}}
    OmegaConf.save(OmegaConf.create(values), tmp_path / "actor.yaml")
    appended = f"flashrl.settings.model.path={text}"
    read = nemo_launcher.read_block([f"--config-path={tmp_path}", "--config-name=actor.yaml", appended])
    _, config, *settings = train_arguments(read, "sampler")
    loaded = load(config, settings)
    assert (loaded.model.path, loaded.rollout.stop, loaded.output) == (text, [text, "b"], f"/results/{text}")
    assert loaded.rollout.weights_folder == f"/results/{text}-weights"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A block whose `flashrl` is a script: job("exit 3") gives the arguments of the launcher's scripts."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(nemo_launcher, "POLL_SECONDS", 0.02)

    def arguments(command: str, kind: str = "actor") -> list[str]:
        (tmp_path / "flashrl").write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\n{command}\n')
        (tmp_path / "flashrl").chmod(0o755)
        values = block("rehearsal", kind)
        values["flashrl"]["output"] = str(tmp_path / "run")
        (tmp_path / f"{kind}.yaml").write_text(yaml.safe_dump(values))
        return [f"--config-path={tmp_path}", f"--config-name={kind}.yaml", "flashrl.settings.model.path=/other"]

    return arguments


def test_the_trainers_code_is_left_for_the_servers(job: Any, tmp_path: Path) -> None:
    assert train(job("exit 75")) == 75
    assert read_result(tmp_path / "run") == 75
    assert "train rehearsal" in (tmp_path / "asked").read_text()
    assert 'model.path="/other"' in (tmp_path / "asked").read_text()  # what the launcher appends replaces the block's
    assert serve(job(WAIT, "critic")) == 75


def test_other_ranks_leave_no_result(job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert train(job("exit 3")) == 3
    assert read_result(tmp_path / "run") is None


def test_a_trainer_that_is_killed_leaves_a_code(job: Any, tmp_path: Path) -> None:
    assert train(job("kill -9 $$")) == 137
    assert read_result(tmp_path / "run") == 137


@pytest.mark.parametrize("changed", ["SLURM_JOB_ID", "SLURM_RESTART_COUNT"])
def test_an_earlier_starts_result_is_no_result(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    """The requeued job finds the first start's 75: its servers must not end by it."""
    assert train(job("exit 75")) == 75
    monkeypatch.setenv(changed, "8")
    assert read_result(tmp_path / "run") is None
    assert read_result(tmp_path / "run", any_start=True) == 75
    servers = job(WAIT, "critic")
    later = threading.Timer(0.3, nemo_launcher.write_result, (tmp_path / "run", 0))
    later.start()
    assert serve(servers) == 0
    later.join()


@pytest.mark.parametrize(("command", "code"), [(DIE, 9), ("exit 0", 1), ("kill -9 $$", 9)])
def test_servers_that_die_fail_their_step(job: Any, command: str, code: int) -> None:
    assert serve(job(command, "critic")) == code


def test_other_tasks_of_a_server_node_wait(job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_LOCALID", "3")
    nemo_launcher.write_result(tmp_path / "run", 4)
    assert serve(job(DIE, "critic")) == 4
    assert not (tmp_path / "asked").exists()


def test_a_warning_signal_reaches_the_trainer_and_its_code_is_kept(job: Any, tmp_path: Path) -> None:
    arguments = job(f"trap 'exit 75' TERM; touch {tmp_path}/ready; while :; do sleep 0.05; done")
    code = "import sys; from nemo_flashrl.launch.nemo_launcher import train; sys.exit(train())"
    rank = subprocess.Popen([sys.executable, "-c", code, *arguments])
    while not (tmp_path / "ready").exists():
        assert rank.poll() is None
        time.sleep(0.02)
    rank.send_signal(signal.SIGTERM)
    assert rank.wait(60) == 75
    assert json.loads((tmp_path / "run-result.json").read_text())["exit_code"] == 75


def test_a_users_question_gets_the_trainers_code(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nemo_flashrl.launch.nemo_launcher", str(tmp_path / "run")]
    assert subprocess.run(command, capture_output=True).returncode == 1
    nemo_launcher.write_result(tmp_path / "run", 5)
    assert subprocess.run(command, capture_output=True).returncode == 5


def test_another_projects_block_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gpt.yaml").write_text("model: {}\n")
    with pytest.raises(ValueError, match="rlhf_ppo=flashrl/<name>"):
        train([f"--config-path={tmp_path}", "--config-name=gpt.yaml"])
