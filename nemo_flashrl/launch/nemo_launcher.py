"""Behind the scripts that the NeMo Framework Launcher starts: its job files -> our command line.

    rlhf_ppo=flashrl/<name>        critic block -> serve_ppo_critic.py      -> flashrl serve-rollout
                                   actor block  -> train_gpt_ppo_actor.py   -> flashrl train
    training=nemotron/flashrl_...  whole file   -> megatron_gpt_pretraining.py -> flashrl train

A script is started once a task with `--config-path=DIR --config-name=FILE key=value ...`. The launcher's job of two
groups ends when both have ended and then reports success whatever happened: the trainer's exit code goes to a
file beside the run, at which the servers end with the same code. `python -m nemo_flashrl.launch.nemo_launcher OUTPUT`
answers with it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import OmegaConf
from yaml import YAMLError

from nemo_flashrl.launch.parent import end_with_parent
from nemo_flashrl.launch.processes import hosts

POLL_SECONDS = 2.0


def train(arguments: Sequence[str] | None = None) -> int:
    """One rank of the trainer; the first one leaves the result file."""
    block = read_block(arguments)
    output = Path(block["flashrl"]["output"])
    code = 1
    try:
        code = _run(train_arguments(block, os.environ.get("SLURM_JOB_NODELIST_HET_GROUP_0")))
    finally:
        if os.environ.get("SLURM_PROCID", "0") == "0":
            write_result(output, code)
    return code


def _run(arguments: list[str]) -> int:
    """`flashrl ARGUMENTS`, its exit code as a shell gives it; SIGTERM is the child's to answer, by a checkpoint."""
    child = subprocess.Popen(["flashrl", *arguments], preexec_fn=end_with_parent)
    before = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    code = child.wait()
    signal.signal(signal.SIGTERM, before)
    return code if code >= 0 else 128 - code


def serve(arguments: Sequence[str] | None = None) -> int:
    """The servers of one node, started by its first task; the others wait, as srun may end a step when some end."""
    block = read_block(arguments)
    output = Path(block["flashrl"]["output"])
    servers = None
    if os.environ.get("SLURM_LOCALID", "0") == "0":
        servers = subprocess.Popen(["flashrl", *serve_arguments(block)], preexec_fn=end_with_parent)
    while (code := read_result(output)) is None:
        if servers is not None and servers.poll() is not None:
            return abs(servers.returncode) or 1
        time.sleep(POLL_SECONDS)
    if servers is not None:
        servers.terminate()
        servers.wait()
    return code


def read_block(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """The block that the launcher wrote, with the `key=value` that it appends to its command.

    Raises:
        ValueError: the block is none of our job files'.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--config-path", required=True)
    parser.add_argument("--config-name", required=True)
    options, overrides = parser.parse_known_args(arguments)
    path = Path(options.config_path, options.config_name)
    block = OmegaConf.load(path)
    for pair in overrides:
        key, _, text = pair.partition("=")
        OmegaConf.update(block, key, _appended(key, text), force_add=True)
    if "flashrl" not in block:
        raise ValueError(f"{path} has no `flashrl` block: choose a job file of nemo_flashrl (rlhf_ppo=flashrl/<name>)")
    block.flashrl.output = os.path.expanduser(block.flashrl.output)
    return OmegaConf.to_container(block, resolve=True)


def _appended(key: str, text: str) -> Any:
    """What YAML makes of a value, but plain text as it is: YAML would refuse a tab and drop spaces at an end."""
    try:
        value = OmegaConf.select(OmegaConf.from_dotlist([f"{key}={text}"]), key)
    except YAMLError:
        return text
    return text if isinstance(value, str) and text[:1] not in ("'", '"') else value


def train_arguments(block: dict[str, Any], server_nodes: str | None) -> list[str]:
    """`flashrl train` of a block; `server_nodes` is Slurm's list of the servers' nodes, None where there are none."""
    ours, model, trainer = block["flashrl"], block["model"], block["trainer"]
    settings = [
        f"output={_path(ours['output'])}",
        f"parallel.tensor={model['tensor_model_parallel_size']}",
        f"parallel.pipeline={model['pipeline_model_parallel_size']}",
        f"parallel.context={model.get('context_parallel_size', 1)}",
    ]
    if trainer["accelerator"] == "gpu":
        settings += [f"cluster.nodes={trainer['num_nodes']}", f"cluster.gpus_per_node={trainer['devices']}"]
    if server_nodes:
        ports = range(ours["port"], ours["port"] + ours["servers_per_node"])
        urls = ",".join(f"http://{host}:{port}" for host in hosts(server_nodes) for port in ports)
        settings += [
            "rollout.engine=vllm",
            f"rollout.servers=[{urls}]",
            f"rollout.weights_folder={_path(ours['output'] + '-weights')}",
        ]
    return ["train", ours["config"], *settings, *key_values(ours["settings"])]


def serve_arguments(block: dict[str, Any]) -> list[str]:
    """`flashrl serve-rollout` of a critic block: as many servers as the node's GPUs make."""
    ours, tensor = block["flashrl"], block["model"]["tensor_model_parallel_size"]
    settings = [f"output={_path(ours['output'])}", f"rollout.weights_folder={_path(ours['output'] + '-weights')}"]
    options = {
        "--host": "0.0.0.0",
        "--port": ours["port"],
        "--servers": block["trainer"]["devices"] // tensor,
        "--tensor-parallel": tensor,
    }
    flags = [str(part) for pair in options.items() for part in pair]
    return ["serve-rollout", ours["config"], *settings, *key_values(ours["settings"]), *flags]


def key_values(settings: dict[str, Any], prefix: str = "") -> list[str]:
    """Nested settings as overrides of a command line.

    >>> key_values({"model": {"path": "/m"}, "rollout": {"stop": [")"]}})
    ['model.path="/m"', 'rollout.stop=[")"]']
    """
    pairs = []
    for name, value in settings.items():
        nested = isinstance(value, dict)
        pairs += key_values(value, f"{prefix}{name}.") if nested else [f"{prefix}{name}={_literal(value)}"]
    return pairs


def _literal(value: Any) -> str:
    """In the grammar of overrides, where a quoted text stands as it is: JSON's escapes would become part of it."""
    if isinstance(value, str):
        return QuotedString(value, Quote.double).with_quotes()
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(name)}: {_literal(item)}" for name, item in value.items()) + "}"
    return json.dumps(value)


def _path(text: str) -> str:
    """Quoted where the grammar of overrides would not read it as it is."""
    return text if re.fullmatch(r"[A-Za-z0-9_./-]+", text) else _literal(text)


def _result_file(output: Path) -> Path:
    return output.with_name(f"{output.name}-result.json")


def _start() -> list[str]:
    """Which start of which job this is: an earlier start's result says nothing about it."""
    return [os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_RESTART_COUNT", "0")]


def write_result(output: Path, code: int) -> None:
    """Leave the trainer's exit code where the servers and the user look for it."""
    file = _result_file(output)
    file.parent.mkdir(parents=True, exist_ok=True)
    staging = file.with_suffix(".partial")
    staging.write_text(json.dumps({"exit_code": code, "start": _start()}) + "\n")
    staging.replace(file)


def read_result(output: Path, any_start: bool = False) -> int | None:
    """The exit code of this start's trainer, or of the last one's with `any_start`; None while there is none."""
    try:
        result = json.loads(_result_file(output).read_text())
    except FileNotFoundError:
        return None
    return result["exit_code"] if any_start or result["start"] == _start() else None


if __name__ == "__main__":
    result = read_result(Path(sys.argv[1]), any_start=True)
    print("no result: the job has not ended, or never started" if result is None else f"exit code {result}")
    sys.exit(1 if result is None else result)
