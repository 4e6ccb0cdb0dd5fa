"""Writes the pages of docs/ that come from the code: `python docs/generate.py`; with --check it only compares.

configuration_reference.md from config/schema.py and the Settings of plug-ins, metrics.md from the metric table,
troubleshooting.md from the doctor's rules, recipes.md from conf/recipe.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import itertools
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf

from nemo_flashrl import algorithms, environments
from nemo_flashrl.config import conf_folder, schema
from nemo_flashrl.doctor.examine import RULES
from nemo_flashrl.doctor.rules_machine import END_RULES
from nemo_flashrl.metrics.table import TABLE

HERE = Path(__file__).parent
NOTE = "<!-- written by docs/generate.py: change the code, then run it again -->\n"


def configuration_reference() -> str:
    """Every field: type, default, what it may be, and its comment in the code."""
    lines = [
        NOTE,
        "# Configuration reference",
        "",
        "Every key of a run's YAML; [configuration.md](configuration.md) explains how files are composed. `null` means",
        "unset; `???` has to be given.",
    ]
    root = schema.RunConfig
    plain = [f for f in dataclasses.fields(root) if section_of(f) is None]
    lines += ["", "## At the top", "", *table(root, plain, "")]
    for item in dataclasses.fields(root):
        section = section_of(item)
        if section is not None:
            lines += ["", f"## {item.name}", "", first_line(section), ""]
            lines += table(section, dataclasses.fields(section), f"{item.name}.")
    for kind, folder in (("algorithm", algorithms), ("environment", environments)):
        for name in plugins(folder):
            settings = folder.load(name).Settings
            lines += ["", f"## {kind}.settings of `{name}`", "", first_line(settings), ""]
            lines += table(settings, dataclasses.fields(settings), f"{kind}.settings.")
    return "\n".join(lines) + "\n"


def plugins(package: Any) -> list[str]:
    """Names in the package's folder that load as plug-ins."""
    names = []
    for file in sorted(Path(package.__file__).parent.glob("*.py")):
        try:
            found = package.load(file.stem)
        except (ValueError, ImportError):
            continue
        if hasattr(found, "Settings"):
            names.append(file.stem)
    return names


def section_of(item: dataclasses.Field) -> type | None:
    """The dataclass of a section's field; None for a plain value."""
    found = getattr(schema, str(item.type), None)
    return found if dataclasses.is_dataclass(found) else None


def first_line(section: type) -> str:
    return (section.__doc__ or "").strip().splitlines()[0]


def table(owner: type, items: Any, prefix: str) -> list[str]:
    comments = dict(comments_of(owner))
    lines = ["| key | type | default | may be | |", "| --- | --- | --- | --- | --- |"]
    for item in items:
        cells = (
            f"`{prefix}{item.name}`",
            str(item.type),
            shown_default(item),
            allowed(item),
            comments.get(item.name, ""),
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def comments_of(owner: type) -> Iterator[tuple[str, str]]:
    """(field, the comment on its line)."""
    for line in inspect.getsource(owner).splitlines():
        found = re.match(r"    (\w+): [^#]*(?:#\s*(.*))?$", line)
        if found:
            yield found[1], found[2] or ""


def shown_default(item: dataclasses.Field) -> str:
    made = item.default_factory
    value = item.default if made is dataclasses.MISSING else made()
    if dataclasses.is_dataclass(value):
        return f"those of `{type(value).__module__.split('.')[-1]}`"
    if value is MISSING or value is dataclasses.MISSING:
        return "`???`"
    words = {None: "null", True: "true", False: "false"}
    return f"`{words[value] if value is None or isinstance(value, bool) else value}`"


def allowed(item: dataclasses.Field) -> str:
    if "choices" in item.metadata:
        return ", ".join(f"`{choice}`" if choice else "empty" for choice in item.metadata["choices"])
    if "range" not in item.metadata:
        return ""
    lowest, highest = item.metadata["range"]
    low = "above 0" if lowest == schema.ABOVE_ZERO else f"{lowest:g}"
    return f"{low} to {highest:g}" if math.isfinite(highest) else low if low == "above 0" else f"{low} or more"


def metrics() -> str:
    lines = [
        NOTE,
        "# Metrics",
        "",
        "What a line of `metrics.jsonl` holds, and TensorBoard and Weights & Biases with it. A name is there when the",
        "run has it: groups, a gate, a reference. Where a number comes from says how it is reduced:",
        "",
        "| source | |",
        "| --- | --- |",
        "| batch | computed once over the whole batch, on the collecting rank |",
        "| mean | a sum over microbatches and data-parallel ranks divided by another such sum, on the last stage |",
        "| sum | summed over microbatches and data-parallel ranks, on the last pipeline stage |",
        "| largest | maximum over microbatches and data-parallel ranks, on the last pipeline stage |",
        "| machine | a clock or a count of faults of the writing rank, or the maximum of a memory counter over ranks |",
        "| trainer | the same on every rank |",
        "",
        "| name | unit | source | meaning |",
        "| --- | --- | --- | --- |",
    ]
    lines += [f"| `{m.name}` | {m.unit} | {m.source} | {m.meaning} |".replace("|trainer", "\\|trainer") for m in TABLE]
    return "\n".join(lines) + "\n"


def troubleshooting() -> str:
    lines = [
        NOTE,
        "# Troubleshooting",
        "",
        "`flashrl doctor RUN` looks for each of these in a run's logs and metrics and gives the evidence: which rank,",
        "which metric, which steps. Causes stand with the likeliest first.",
    ]
    for rule in (*END_RULES, *RULES):
        lines += ["", f"## {rule.title}", "", f"Rule `{rule.name}`.", "", "Causes:", ""]
        lines += [f"{number}. {cause}" for number, cause in enumerate(rule.causes, 1)]
        lines += ["", f"Change: {rule.change}"]
        lines += [line for condition, change in rule.change_where for line in ("", f"With `{condition}`: {change}")]
    return "\n".join(lines) + "\n"


RECIPES = ("paper", "long_agent", "grpo_baseline", "orthogonal")


def recipe_settings(file: Path) -> Any:
    """What a recipe sets, with what it is built on; interpolations as they are written."""
    text = file.read_text()
    raw = OmegaConf.create(text)
    built_on = OmegaConf.create({})
    for item in raw.pop("defaults", []):
        if item == "_self_":
            continue
        if isinstance(item, str):
            built_on = OmegaConf.merge(built_on, recipe_settings(file.parent / f"{item}.yaml"))
        else:
            chosen = conf_folder() / "algorithm" / f"{item['override /algorithm']}.yaml"
            built_on = OmegaConf.merge(built_on, {"algorithm": OmegaConf.load(chosen)})
    return OmegaConf.merge(built_on, raw)


def flat(node: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, value as YAML writes it)."""
    for name, value in node.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield (
                prefix + name,
                "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value),
            )


def recipes() -> str:
    folder = conf_folder() / "recipe"
    assert {file.stem for file in folder.glob("*.yaml")} == set(RECIPES)
    settings = {n: dict(flat(OmegaConf.to_container(recipe_settings(folder / f"{n}.yaml")))) for n in RECIPES}
    keys = list(dict.fromkeys(key for own in settings.values() for key in own))
    different = [key for key in keys if len({own.get(key) for own in settings.values()}) > 1]
    same = [f"`{key}={settings[RECIPES[0]][key]}`" for key in keys if key not in different]
    lines = [
        NOTE,
        "# Recipes",
        "",
        "A recipe is one setting that chooses an algorithm and its techniques together:",
        "",
        "    flashrl train rehearsal recipe=long_agent output=runs/long_agent model.path=warm_start",
        "",
        "It overrides the experiment's own settings; model, environment, lengths and learning rate stay the",
        "experiment's, and other keys on the command line override the recipe. A recipe and a [budget](ablations.md)",
        "each choose an algorithm: both together are refused.",
        "",
        "| recipe | |",
        "| --- | --- |",
    ]
    for name in RECIPES:
        comment = (folder / f"{name}.yaml").read_text().splitlines()[1]
        lines.append(f"| `{name}` | {comment.removeprefix('# ')} |")
    lines += [
        "",
        "## Which differ by what",
        "",
        "A dash: the recipe leaves it to the experiment, or its algorithm has none.",
        "",
    ]
    lines += ["| setting | " + " | ".join(f"`{name}`" for name in RECIPES) + " |", "| --- |" + " --- |" * len(RECIPES)]
    for key in different:
        lines.append(f"| `{key}` | " + " | ".join(settings[name].get(key, "-") for name in RECIPES) + " |")
    lines += [
        "",
        "The same in all of them: " + ", ".join(same) + ".",
        "",
        "| from | to | changes |",
        "| --- | --- | --- |",
    ]
    for first, second in itertools.combinations(RECIPES, 2):
        moved = [f"`{key}`" for key in different if settings[first].get(key) != settings[second].get(key)]
        lines.append(f"| `{first}` | `{second}` | {', '.join(moved)} |")
    lines += ["", "When to use which technique, and what it clashes with: [techniques.md](techniques.md)."]
    return "\n".join(lines) + "\n"


PAGES = {
    "configuration_reference.md": configuration_reference,
    "metrics.md": metrics,
    "troubleshooting.md": troubleshooting,
    "recipes.md": recipes,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the pages of docs/ that come from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page is out of date")
    check = parser.parse_args().check
    stale = [n for n, make in PAGES.items() if not (HERE / n).is_file() or (HERE / n).read_text() != make()]
    for name in stale if not check else ():
        (HERE / name).write_text(PAGES[name]())
    print(f"{'out of date' if check else 'written'}: {', '.join(stale) or 'none'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
