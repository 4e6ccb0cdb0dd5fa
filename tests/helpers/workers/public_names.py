"""Public names are there and say what they are; read in a rank, as some need NeMo."""

from __future__ import annotations

import importlib
import inspect


def main(packages: list[str]) -> None:
    for package in packages:
        module = importlib.import_module(package)
        for name in module.__all__:
            assert inspect.getdoc(getattr(module, name)), f"{package}.{name} has no docstring"
