"""In the environment of `make gpu-env`, on a CPU: what needs the packages of a GPU's image, and no GPU."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from pathlib import Path

import gpu_env
import pytest
from paths import TESTS
from stand_in_process import STAND_IN, StandInProcess
from tiny import FAMILIES

pytestmark = pytest.mark.skipif(not gpu_env.IS_THERE, reason="needs the environment of `make gpu-env`")

IMPORTS = """
import importlib, pkgutil
from nemo_flashrl import platform
platform.install()
import torch, triton, transformer_engine.pytorch
from nemo.collections.llm.gpt.model import base
from megatron.core.extensions import transformer_engine as engine
assert torch.version.cuda and base.HAVE_TE and engine.TELinear
import nemo_flashrl
names = [module.name for module in pkgutil.walk_packages(nemo_flashrl.__path__, "nemo_flashrl.")]
left_out = ("nemo_flashrl.rollout_server", "nemo_flashrl.conf")  # vLLM's
imported = [importlib.import_module(name) for name in names if not name.startswith(left_out)]
from nemo_flashrl import config
for path in (config.conf_folder() / "experiment").glob("*.yaml"):
    config.load(path.stem, [], unneeded=("output", "model.path"))
print(len(imported), platform.transformer_engine(), platform.has_gpu())
"""


def test_all_modules_import_beside_transformer_engine_and_configurations_load(tmp_path: Path) -> None:
    done = gpu_env.run("python", "-W", "ignore", "-c", IMPORTS, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout.split()[0]) > 150
    assert done.stdout.strip().endswith("(2, 12) False")


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["--help"], "rehearse"),
        (["plan", "llama3_8b_32k"], "H800"),
        (["doctor", "nowhere"], "nowhere"),
    ],
    ids=["help", "plan", "doctor"],
)
def test_commands(tmp_path: Path, command: list[str], says: str) -> None:
    done = gpu_env.run("flashrl", *command, folder=tmp_path)
    assert done.returncode == (2 if "doctor" in command else 0), done.stderr
    assert says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_the_recorded_signatures_are_those_of_what_is_installed() -> None:
    reader = runpy.run_path(str(STAND_IN / "signatures.py"))
    (sources,) = gpu_env.FOLDER.glob("lib/python*/site-packages/transformer_engine/pytorch")
    found: dict[str, list[str]] = {}
    for name, file in reader["FILES"].items():
        found |= reader["signatures"](name, (sources / file).read_text())
    assert found == json.loads((STAND_IN / "signatures.json").read_text())["release_v2.12"]


@pytest.fixture(scope="module", params=[1, 2], ids="{} tensor ranks".format)
def families(request: pytest.FixtureRequest, engine: StandInProcess) -> dict:
    return engine.run("te_weights", ranks=request.param, tensor=request.param)


@pytest.fixture(scope="module")
def engine() -> Iterator[StandInProcess]:
    process = StandInProcess("cpu", engine_python=gpu_env.PYTHON)
    yield process
    process.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_go_into_its_layers_and_back_bit_for_bit(family: str, families: dict) -> None:
    found = families[family]
    mlp = "GroupedLinear" if family in ("mixtral", "qwen3_moe") else "LayerNormLinear"
    assert found["engine"] == ["LayerNormLinear", "Linear", "RMSNorm", mlp]
    assert found["tensors"] > 20 and not found["changed"]
    assert not found["keys"] and not found["shapes"]


def test_the_heads_kernels_in_tritons_interpreter(tmp_path: Path) -> None:
    test = TESTS / "ops" / "test_policy_head_kernels.py"
    options = ["--noconftest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-W", "ignore", str(test)]
    done = gpu_env.run("python", "-m", "pytest", *options, folder=tmp_path, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert " passed" in done.stdout and "skipped" not in done.stdout
