"""Wheel and source archive hold all that is needed, and what they hold runs outside the checkout."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from paths import ROOT

from nemo_flashrl.cli import main
from nemo_flashrl.run.jsonl import read_metrics

SOURCES = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "nemo_flashrl", "hydra_plugins", "conf")
CONTENTS = {".py", ".yaml", ".html", ".css", ".js"}


def contents(folder: Path, name: str) -> set[str]:
    """What of a source folder belongs into a package; `nemo_flashrl/conf` is a link, which is followed."""
    found = (Path(top) / file for top, _, files in os.walk(folder / name, followlinks=True) for file in files)
    return {str(file.relative_to(folder)) for file in found if file.suffix in CONTENTS}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source, the source archive made of it, and the wheel made of that archive."""
    folder = tmp_path_factory.mktemp("packaging")
    (folder / "source").mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            skipped = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / "source" / name, symlinks=True, ignore=skipped)
        else:
            shutil.copy(ROOT / name, folder / "source")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), "."]
    made = subprocess.run(command, cwd=folder / "source", capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stdout + made.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = (built / "dist").glob("*.whl")
    return path


def test_the_wheel_holds_code_configurations_and_the_reports_page(built: Path, wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == contents(built / "source", "nemo_flashrl") | contents(built / "source", "hydra_plugins")
    assert {"nemo_flashrl/conf/experiment/llama3_70b.yaml", "nemo_flashrl/report/page.html"} <= names


def test_the_source_archive_holds_the_same(built: Path, wheel: Path) -> None:
    (path,) = (built / "dist").glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed | {"setup.cfg", "pyproject.toml", "README.md", "LICENSE"} <= names


def test_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    read = {Path(n).name: archive.read(n).decode() for n in archive.namelist() if ".dist-info/" in n}
    metadata = email.message_from_string(read["METADATA"])
    assert {"nemo", "rollout", "environments", "dev"} <= set(metadata.get_all("Provides-Extra"))
    needed = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert not [line for line in needed if line.startswith(("nemo", "megatron", "vllm"))]
    assert "flashrl = nemo_flashrl.cli:main" in read["entry_points.txt"]
    assert "flashrl = nemo_flashrl.recipes" in read["entry_points.txt"]


@pytest.fixture
def run_installed(wheel: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`flashrl ARGUMENTS` of the wheel, in an empty folder of this name; its processes find the wheel too."""
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    code = f"import nemo_flashrl.cli as c; assert c.__file__.startswith({str(installed)!r}); raise SystemExit(c.main())"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "empty").mkdir()
        environment = {**os.environ, "PYTHONPATH": str(installed)}
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(
            command, cwd=tmp_path / "empty", env=environment, capture_output=True, text=True, timeout=500
        )

    return run


@pytest.mark.parametrize("command", [["plan", "llama3_70b"], ["serve-rollout", "--help"]], ids=" ".join)
def test_it_runs_from_an_empty_folder(run_installed: Callable, tmp_path: Path, command: list[str]) -> None:
    run = run_installed(*command)
    assert run.returncode == 0, run.stderr
    assert list((tmp_path / "empty").iterdir()) == []


def test_it_rehearses_an_experiment_in_an_empty_folder(
    run_installed: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["rehearse", "--experiment", "math_qwen2_5_1_5b", "cluster.gpus_per_node=1", "--output"]
    run = run_installed(*command, "out")
    assert run.returncode == 0, run.stdout + run.stderr
    said = "the job runs in this topology and completes every step (3 updates of 4 trajectories in 1 processes)"
    assert f"OK   {said}" in run.stdout
    assert "FAIL" not in run.stdout
    assert "can only be checked on the cluster" in run.stdout
    assert [file.name for file in (tmp_path / "empty").iterdir()] == ["out"]
    out = tmp_path / "empty" / "out"
    assert [step["step"] for step in read_metrics(out / "run" / "metrics.jsonl")] == [1, 2, 3]
    assert (out / "run" / "checkpoint" / "model.safetensors").is_file()
    assert main([*command, str(out)]) == 2  # never overwritten
    assert "exists" in capsys.readouterr().err


def test_the_locks_of_both_pythons_hold_the_same_versions() -> None:
    first, second = (
        dict(
            line.split("==")
            for line in (ROOT / f"requirements-cpu{python}.lock").read_text().splitlines()
            if "==" in line
        )
        for python in ("", "-3.12")
    )
    assert first.pop("torch") == second.pop("torch") + "+cpu"
    assert second.pop("setuptools")  # which an environment of 3.11 is made with
    assert first == second
