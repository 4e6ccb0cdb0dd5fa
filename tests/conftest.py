"""Shared by all tests: one thread, and the modules of helpers/ and of benchmarks/ on the path."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent / "helpers"))
# The fork server looks for modules there.
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])

import torch

torch.set_num_threads(1)

import pytest  # noqa: E402
from real_server import RealServer, rollout_python  # noqa: E402
from session_processes import SessionProcesses  # noqa: E402

from nemo_flashrl.rehearsal.warm_start import make_warm_start  # noqa: E402

REAL_SERVER = "vllm_server"
SERVER = pytest.StashKey[RealServer]()
PROCESSES = pytest.StashKey[SessionProcesses]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[PROCESSES] = SessionProcesses()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The real server takes a minute or more to come up: it begins with the session, and its tests come late.

    What looks back over the session comes last.
    """
    waiting = [item for item in items if REAL_SERVER in getattr(item, "fixturenames", ())]
    last = [item for item in items if "session_processes" in getattr(item, "fixturenames", ())]
    items[:] = [item for item in items if item not in [*waiting, *last]] + waiting + last
    if waiting and not config.option.collectonly and rollout_python() is not None:
        config.stash[SERVER] = RealServer()


def pytest_collection_finish() -> None:
    """A full collection over all imported modules takes half a second, longer than the shortest time-outs here."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    _end_server(config)


def _end_server(config: pytest.Config) -> None:
    if SERVER in config.stash and config.stash[SERVER].process.poll() is None:
        config.stash[SERVER].end()


@pytest.fixture(scope="session")
def vllm_server(request: pytest.FixtureRequest) -> RealServer:
    """The one vLLM server of a session, ready."""
    if SERVER not in request.config.stash:
        pytest.skip("vLLM is not installed here: `make rollout-venv` does it on Linux x86-64")
    server = request.config.stash[SERVER]
    server.wait()
    return server


@pytest.fixture(scope="session")
def warm_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rehearsal's model, to be read alone: it solves some tasks and not others, so every batch has a gradient."""
    return make_warm_start(tmp_path_factory.mktemp("rehearsal") / "warm_start")


@pytest.fixture(scope="session")
def session_processes(request: pytest.FixtureRequest) -> SessionProcesses:
    """Of everything that this session has started; the tests that ask for it come last, so the server ends first."""
    _end_server(request.config)
    return request.config.stash[PROCESSES]
