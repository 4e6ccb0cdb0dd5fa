"""Names to classes: how a configuration chooses an algorithm, an environment or an engine.

A bare name is a module of the plug-in folder that defines the class of the same name:

    load_class("nemo_flashrl.algorithms", "flash_reinforce")        flash_reinforce.py there, class FlashReinforce
    load_class("nemo_flashrl.environments", "my_task.env.MyTask")   the user's own class, by dotted path
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any


def load_class(package: str, name: str) -> type:
    """The class that `name` stands for: a module of `package`, or a dotted path `module.Class`.

    Raises:
        ValueError: nothing has that name; the message lists the names of `package`.
    """
    if "." in name:
        return _load_dotted(package, name)
    classes = available(package)
    if name not in classes:
        raise ValueError(f"{package} has nothing named {name!r}; {_choices(package)}")
    return getattr(importlib.import_module(f"{package}.{name}"), classes[name])


def available(package: str) -> dict[str, str]:
    """The bare names that `package` offers, sorted, each with its class's name.

    The class is the module's name in CamelCase, in whatever case its acronyms have (`vllm_engine`: `VLLMEngine`).
    A plug-in declares `Settings`, or inherits them; what does neither helps the plug-ins of the folder. A protocol does
    not count: it is what they satisfy. Sources are parsed, not imported, so that a plug-in whose dependencies are
    missing neither fails nor hides the others.
    """
    classes: dict[str, ast.ClassDef] = {}
    for found in pkgutil.iter_modules(importlib.import_module(package).__path__):
        spec = found.module_finder.find_spec(found.name, None)
        source = spec.loader.get_source(found.name) or ""
        for node in ast.parse(source, filename=spec.origin or found.name).body:
            if isinstance(node, ast.ClassDef) and node.name.lower() == found.name.replace("_", "").lower():
                classes[found.name] = node
    classes = {name: node.name for name, node in classes.items() if _is_plugin(node)}
    return dict(sorted(classes.items()))


def _is_plugin(node: ast.ClassDef) -> bool:
    if any(ast.unparse(base).split("[")[0].endswith("Protocol") for base in node.bases):
        return False
    targets = [target for part in node.body if isinstance(part, ast.Assign) for target in part.targets]
    return bool(node.bases) or any(isinstance(target, ast.Name) and target.id == "Settings" for target in targets)


def load_function(path: str) -> Callable[..., Any]:
    """What a dotted path `module.function` stands for.

    Raises:
        ValueError: it stands for nothing that can be called.
    """
    chosen = _resolve(path, "give a dotted path 'package.module.function'")
    if not callable(chosen):
        raise ValueError(f"{path!r} is no function: give a dotted path 'package.module.function'")
    return chosen


def _load_dotted(package: str, path: str) -> type:
    chosen = _resolve(path, _choices(package))
    if not isinstance(chosen, type):
        module_name, _, class_name = path.rpartition(".")
        raise ValueError(f"{path!r}: module {module_name!r} has no class {class_name!r}; {_choices(package)}")
    return chosen


def _resolve(path: str, remedy: str) -> Any:
    """The attribute at a dotted path, None where the module has none of that name."""
    module_name, _, name = path.rpartition(".")
    if not module_name or not all(part.isidentifier() for part in path.split(".")):
        raise ValueError(f"{path!r} is not a dotted path like 'package.module.Class'; {remedy}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A dependency that the user's module lacks is the user's real problem: only a wrong path is reworded.
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise
        places = "from the configuration's folder or PYTHONPATH"
        raise ValueError(f"{path!r}: no module {error.name!r} can be imported {places}; {remedy}") from error
    return getattr(module, name, None)


def _choices(package: str) -> str:
    return f"available: {', '.join(available(package)) or 'none'}, or a dotted path 'package.module.Class'"
