"""Who may import whom, and which words may stand where."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

PACKAGE = ROOT / "nemo_flashrl"
FILES = sorted(p for p in PACKAGE.rglob("*.py") if "conf" not in p.relative_to(PACKAGE).parts)
TRAINER = {"nemo", "lightning", "megatron"}
STDLIB = sys.stdlib_module_names
# The rooms in the order of the arrows: a module imports of its own room and of those before it.
ROOMS = (
    *("records.py", "plugins.py", "config", "platform", "ops", "algorithms", "metrics", "launch", "run"),
    *("environments", "weight_sync", "engines", "batching", "rollout", "data", "weights", "models", "callbacks"),
    *("plan", "preflight", "rollout_server", "convert", "build.py", "train.py", "doctor", "report", "rehearsal"),
    *("ablation", "commands", "cli.py", "recipes.py"),
)
# Room -> what it may import beside the standard library, where that is less.
ALLOWED = {
    "records.py": {"numpy"},
    "config": {"hydra", "omegaconf", "yaml", "nemo_flashrl.config"},
    "plugins.py": set(),
    "rollout_server": {
        *("torch", "safetensors", "vllm"),
        *("nemo_flashrl.config", "nemo_flashrl.launch.parent", "nemo_flashrl.platform", "nemo_flashrl.rollout_server"),
        "nemo_flashrl.weight_sync",
    },
    "weight_sync": {"torch", "safetensors", "nemo_flashrl.platform", "nemo_flashrl.weight_sync"},
    "algorithms": {"torch", "nemo_flashrl.algorithms", "nemo_flashrl.plugins"},
    "ops": {"torch", "triton", "fused_weight_gradient_mlp_cuda", "nemo_flashrl.ops"},
    "batching": {"numpy", "nemo_flashrl.batching"},
}
HARDWARE = "platform"
MAY_IMPORT_TRAINER = {
    *("models", "callbacks", "weights", "convert", HARDWARE),
    *("build.py", "train.py", "data/datamodule.py"),
}


def imports(path: Path) -> set[str]:
    """Absolute module names imported anywhere in a file, functions included; not under TYPE_CHECKING."""
    tree = ast.parse(path.read_text())
    guarded = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and getattr(block.test, "id", "") == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    package = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts[:-1])
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package if node.level else ""
            module = ".".join(filter(None, [base, node.module or ""]))
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] not in STDLIB}


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_stay_in_their_room(path: Path) -> None:
    names = imports(path)
    relative = str(path.relative_to(PACKAGE))
    if room(path) in ALLOWED:
        allowed = ALLOWED[room(path)]
        strangers = {n for n in names if not any(n == a or n.startswith(f"{a}.") for a in allowed)}
        assert not strangers, f"{relative} may import {sorted(allowed)} only"
    if room(path) not in MAY_IMPORT_TRAINER and relative not in MAY_IMPORT_TRAINER:
        assert not {n for n in names if n.split(".")[0] in TRAINER}, f"{relative} must do without the trainer"


def own_room(name: str) -> str:
    """The room of a module of ours by its dotted name."""
    first = name.split(".")[1]
    return first if first in ROOMS else f"{first}.py"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_import_goes_upward(path: Path) -> None:
    if room(path) == "__init__.py":
        return
    place = ROOMS.index(room(path))
    ours = {name for name in imports(path) if name.startswith("nemo_flashrl.")}
    upward = {name for name in ours if ROOMS.index(own_room(name)) > place}
    assert not upward, f"{path.relative_to(PACKAGE)} stands before these"


def test_the_map_names_every_room() -> None:
    text = (PACKAGE / "__init__.py").read_text()
    named = re.findall(r"^    ([a-z_]+(?:/|\.py))  ", text, re.MULTILINE)
    assert sorted(name.rstrip("/") for name in named) == sorted(ROOMS)
    there = {p.name for p in PACKAGE.iterdir() if p.suffix == ".py" or (p.is_dir() and (p / "__init__.py").is_file())}
    assert there - {"__init__.py", "conf"} == set(ROOMS)


def test_the_tree_stays_small() -> None:
    modules = [path for path in FILES if path.name != "__init__.py"]
    assert len(modules) <= 165
    assert len([path for path in modules if path.parent == PACKAGE]) <= 7


def drawn() -> list[tuple[int, str, str]]:
    """(number, file, function) of each hand-off in the picture at the top of train.py."""
    text = ast.get_docstring(ast.parse((PACKAGE / "train.py").read_text()))
    found = re.findall(r"^ +(\d+)  ([\w/]+\.py):([\w.]+)", text, re.MULTILINE)
    return [(int(number), file, function) for number, file, function in found]


def test_the_loop_is_drawn_as_it_is() -> None:
    hands = drawn()
    assert [number for number, _, _ in hands] == list(range(1, len(hands) + 1))
    text = (PACKAGE / "train.py").read_text()
    before_the_step = drawn_before(text)
    assert len(before_the_step) <= 11 and len(hands) <= 16
    for _, file, function in hands:
        assert function in functions(PACKAGE / file), f"{file} has no {function}"


def drawn_before(text: str) -> list[str]:
    """The lines of the picture from the prompt to the optimizer step."""
    picture = text[text.index("    prompt\n") : text.index("    optimizer step")]
    return picture.splitlines()[1:]


def functions(path: Path) -> set[str]:
    """`function` and `Class.method` of a file."""
    tree, kinds = ast.parse(path.read_text()), ast.FunctionDef | ast.AsyncFunctionDef
    plain = {node.name for node in tree.body if isinstance(node, kinds)}
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return plain | {f"{c.name}.{part.name}" for c in classes for part in c.body if isinstance(part, kinds)}


@pytest.mark.parametrize("path", sorted((PACKAGE / "callbacks").glob("*.py")), ids=lambda p: p.name)
def test_callbacks_change_a_step_by_its_methods_alone(path: Path) -> None:
    """What they read is a field; they call `report` and `reduce_rewards`, and assign to nothing of it."""
    text = path.read_text()
    assert not re.findall(r"\bcurrent(?:_step)?\.(?:\w+)(?:\[[^]]*\])? [-+|]?= ", text)
    called = set(re.findall(r"\bcurrent(?:_step)?((?:\.\w+)+)\(", text))
    assert called <= {".report", ".reduce_rewards"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_hardware_is_named_in_platform_alone(path: Path) -> None:
    if room(path) == HARDWARE:
        return
    code = "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
    words = re.findall(r"\b(cuda|nccl|gloo)\b", code)
    assert not words, f"{path.relative_to(PACKAGE)} says {sorted(set(words))}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_and_functions_stay_short(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 60, f"{node.name} is longer than 60 lines"


def test_importing_the_package_is_cheap() -> None:
    code = "import sys, nemo_flashrl, nemo_flashrl.config; print(sorted({'torch', 'nemo'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
