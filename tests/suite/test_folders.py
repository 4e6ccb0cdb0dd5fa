"""Where a test lies."""

from __future__ import annotations

from paths import ROOT, TESTS

# What crosses rooms.
CROSSING = {
    "benchmarks",  # the programs of benchmarks/
    "docs",  # pages, the commands in them, examples
    "gpu",  # skipped without one
    "gpu_env",  # Transformer Engine itself on a CPU; skipped without the environment of `make gpu-env`
    "gpu_shapes",  # a GPU's training step on tensors without values
    "package",  # imports, public names, plugins, recipes, wheel
    "real_weights",  # of published models, and their tokenizers; skipped where `make models` has not installed them
    "slurm",  # job scripts, and a real Slurm
    "suite",  # the tests themselves
    "vllm_server",  # against a real server
    "whole_runs",  # the trainer's steps and runs from end to end
}


def test_folders_are_rooms_of_the_package_or_cross_them() -> None:
    rooms = {path.parent.name for path in (ROOT / "nemo_flashrl").glob("*/__init__.py")}
    assert not rooms & CROSSING
    folders = {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")}
    assert folders - rooms == CROSSING
    assert all(len(path.relative_to(TESTS).parts) == 2 for path in TESTS.rglob("test_*.py"))
