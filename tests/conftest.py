"""Shared by all tests: one thread, and the modules of helpers/ and of benchmarks/ on the path."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent / "helpers"))
# The fork server looks for modules there.
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])

import torch

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as nohup and a script's `&` leave it, to what tests start too
    signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()  # until all tests are imported and collected

import pytest  # noqa: E402
from paths import TESTS  # noqa: E402
from real_server import RealServer, served  # noqa: E402
from session_processes import SessionProcesses  # noqa: E402
from xdist.scheduler import LoadScopeScheduling  # noqa: E402

from nemo_flashrl.platform.cpu_patches import no_compilation  # noqa: E402
from nemo_flashrl.rehearsal.warm_start import make_warm_start  # noqa: E402

if not torch.cuda.is_available():  # some modules of tests import Megatron, which compiles, with no platform prepared
    patch = no_compilation()
    setattr(patch.owner, patch.name, patch.replacement)

# What the tests of such a folder share takes half a minute or more to make: one worker has all of them.
SHARE = ("vllm_server", "real_weights", "gpu_shapes")
# The folders whose tests take longest, mostly in processes of their own. Two workers begin with them: what is left at
# the end is short, and neither worker has to wait long for the other.
LONG_FIRST = (
    *("slurm", "vllm_server", "weights", "real_weights", "gpu_shapes", "rehearsal", "whole_runs"),
    *("package", "docs", "engines", "ops"),
)
PROCESSES = pytest.StashKey[SessionProcesses]()
LEFT = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """The workers of `pytest -n` and what they start carry the mark of the process that began them."""
    if not hasattr(config, "workerinput"):
        config.stash[PROCESSES] = SessionProcesses()


class ByFile(LoadScopeScheduling):
    """The tests of a file go to one worker of `pytest -n`, in order; those of some folders do."""

    def _split_scope(self, nodeid: str) -> str:
        file = Path(nodeid.split("::")[0])
        return str(file.parent if file.parent.name in SHARE else file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long ones first."""
    places = {folder: place for place, folder in enumerate(LONG_FIRST)}
    items.sort(key=lambda item: places.get(item.path.relative_to(TESTS).parts[0], len(places)))


def pytest_collection_finish() -> None:
    """A full collection over all imported modules takes half a second, longer than the shortest time-outs here."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """When all workers have ended: what the tests leave on the machine fails the session."""
    if PROCESSES in session.config.stash and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        session.config.stash[LEFT] = session.config.stash[PROCESSES].left()
        if session.config.stash[LEFT]:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if lines := config.stash.get(LEFT, []):
        terminalreporter.section("left on the machine", red=True)
        for line in lines:
            terminalreporter.line(line)


@pytest.fixture(scope="session")
def vllm_server() -> Iterator[RealServer]:
    """The one vLLM server of a session, ready."""
    with served() as server:
        yield server


@pytest.fixture(scope="session")
def warm_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rehearsal's model, to be read alone: it solves some tasks and not others, so every batch has a gradient."""
    return make_warm_start(tmp_path_factory.mktemp("rehearsal") / "warm_start")
