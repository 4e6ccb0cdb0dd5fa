"""Names to classes: bare names from a folder, dotted paths from anywhere."""

from __future__ import annotations

import importlib
import os
import sys

import pytest

from nemo_flashrl import algorithms
from nemo_flashrl.algorithms.flash_reinforce import FlashReinforce
from nemo_flashrl.algorithms.grpo import Grpo
from nemo_flashrl.plugins import available, load_class, load_function

SOURCES = {
    "__init__": "",
    "engine": "from typing import Protocol\nclass Engine(Protocol[int]):\n    pass\n",
    "two_words": "class Helper:\n    pass\nclass TwoWords:\n    Settings = dict\n",
    "vllm_engine": "from .two_words import TwoWords\nclass VLLMEngine(TwoWords):\n    pass\n",
    "heavy": "import a_package_nobody_has\nclass Heavy:\n    Settings = dict\n",
    "schedule": "class Schedule:\n    pass\n",
    "imported": "from folder_of_plugins.two_words import TwoWords as Imported\n",
    "helpers": "def helpers():\n    pass\n",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    directory = tmp_path / "folder_of_plugins"
    directory.mkdir()
    for name, source in SOURCES.items():
        (directory / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield "folder_of_plugins"
    for name in [name for name in sys.modules if name.split(".")[0] == "folder_of_plugins"]:
        del sys.modules[name]


def test_algorithms_by_bare_name_and_dotted_path():
    assert algorithms.load("flash_reinforce") is FlashReinforce
    assert algorithms.load("grpo") is Grpo
    assert algorithms.load("nemo_flashrl.algorithms.grpo.Grpo") is Grpo
    # The protocol, in algorithm.py, is no algorithm; sums, in tokens.py, and `Credit`, in credit.py, are none either.
    assert list(available("nemo_flashrl.algorithms")) == ["flash_reinforce", "grpo"]


@pytest.mark.parametrize("name", ["ppo", "algorithm", "tokens", "FlashReinforce", "", "../grpo"])
def test_unknown_names_list_the_available_ones(name):
    with pytest.raises(ValueError, match=r"available: flash_reinforce, grpo, or a dotted path 'package.module.Class'"):
        algorithms.load(name)


def test_a_new_file_is_a_new_name(folder):
    assert available(folder) == {"heavy": "Heavy", "two_words": "TwoWords", "vllm_engine": "VLLMEngine"}
    assert load_class(folder, "two_words").__name__ == "TwoWords"
    assert load_class(folder, "vllm_engine").__name__ == "VLLMEngine"
    assert "folder_of_plugins.heavy" not in sys.modules
    # From another folder's point of view, the user's own class by dotted path.
    assert load_class("nemo_flashrl.algorithms", f"{folder}.two_words.Helper").__name__ == "Helper"


def test_a_missing_dependency_is_not_called_an_unknown_name(folder):
    for name in ("heavy", f"{folder}.heavy.Heavy"):
        with pytest.raises(ModuleNotFoundError, match="a_package_nobody_has"):
            load_class(folder, name)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no_such_package.module.Class", "no module 'no_such_package' can be imported"),
        ("folder_of_plugins.absent.Class", "no module 'folder_of_plugins.absent' can be imported"),
        ("folder_of_plugins.two_words.Absent", "module 'folder_of_plugins.two_words' has no class 'Absent'"),
        ("folder_of_plugins.helpers.helpers", "module 'folder_of_plugins.helpers' has no class 'helpers'"),
        (".two_words.TwoWords", "is not a dotted path"),
        ("folder_of_plugins..TwoWords", "is not a dotted path"),
    ],
)
def test_wrong_paths_are_named(folder, path, words):
    with pytest.raises(ValueError, match=words) as error:
        load_class(folder, path)
    assert repr(path) in str(error.value)
    assert "available: heavy, two_words, vllm_engine" in str(error.value)


def test_functions_by_dotted_path() -> None:
    assert load_function("os.path.join") is os.path.join
    for path, message in (
        ("join", "'join' is not a dotted path"),
        ("os.path.sep", "'os.path.sep' is no function"),
        ("os.path.jion", "'os.path.jion' is no function"),
        ("no_such_module.f", "no module 'no_such_module' can be imported"),
    ):
        with pytest.raises(ValueError, match=message):
            load_function(path)
