"""The Python API: what docs/python.md lists is what each package exports, and examples import nothing else of ours."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest
from paths import ROOT
from processes import run_ranks

PAGE = (ROOT / "docs" / "python.md").read_text()
SECTIONS = dict(re.findall(r"^### `(nemo_flashrl\.\w+)`\n(.*?)(?=^##|\Z)", PAGE, re.M | re.S))
KEPT = {  # users' code holds these: they are never taken away
    "nemo_flashrl.algorithms": {"flash_reinforce_loss", "group_advantages", "grpo_loss"},
    "nemo_flashrl.callbacks": {"EMAReferenceCallback", "RLMetricsCallback", "WeightRefitCallback"},
    "nemo_flashrl.data": {"LengthBatcher", "RolloutDataModule"},
    "nemo_flashrl.engines": {"Engine", "TransformersEngine", "VLLMEngine"},
    "nemo_flashrl.environments": {"Environment"},
    "nemo_flashrl.models": {"FlashReinforceModel", "GRPOModel"},
    "nemo_flashrl.ops": {"fused_linear_logprob", "fused_linear_policy_loss"},
    "nemo_flashrl.platform": {"install"},
    "nemo_flashrl.rollout": {"Collector", "RolloutDriver"},
}


def test_the_page_has_every_package() -> None:
    assert SECTIONS.keys() == KEPT.keys()


@pytest.mark.parametrize("package", KEPT)
def test_the_page_lists_what_a_package_exports(package: str) -> None:
    exported = importlib.import_module(package).__all__
    assert KEPT[package] <= set(exported)
    assert re.findall(r"^\| `(\w+)` \| .+ \|$", SECTIONS[package], re.M) == sorted(exported, key=str.lower)


def test_every_name_can_be_imported_and_has_a_docstring() -> None:
    run_ranks(1, "public_names", list(KEPT))


@pytest.mark.parametrize("example", sorted(ROOT.glob("examples/*.py")), ids=lambda p: p.name)
def test_examples_import_public_names_alone(example: Path) -> None:
    for node in ast.walk(ast.parse(example.read_text())):
        names = [alias.name for alias in getattr(node, "names", ()) if isinstance(alias, ast.alias)]
        if isinstance(node, ast.Import):
            assert not [name for name in names if name.startswith("nemo_flashrl")]
        elif isinstance(node, ast.ImportFrom) and node.module == "nemo_flashrl":
            assert {f"nemo_flashrl.{name}" for name in names} <= KEPT.keys()
        elif isinstance(node, ast.ImportFrom) and node.module.startswith("nemo_flashrl"):
            assert set(names) <= set(importlib.import_module(node.module).__all__) and node.module in KEPT
