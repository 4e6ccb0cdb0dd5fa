"""Pages that come from the code are up to date; links and settings in the others hold."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from paths import ROOT

from nemo_flashrl.config import RunConfig

PAGES = sorted([*ROOT.glob("README*.md"), *(ROOT / "docs").glob("*.md")])


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_generated_pages_are_up_to_date() -> None:
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    for name, make in generate["PAGES"].items():
        assert (ROOT / "docs" / name).read_text() == make(), f"{name} is out of date: run python docs/generate.py"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target, heading in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
        if "://" not in target:
            file = page.parent / target if target else page
            assert file.exists(), target
            assert not heading or heading in headings(file), f"{target}#{heading}"


def headings(page: Path) -> set[str]:
    """Of a page, as the part of a link after #: "What is saved" is what-is-saved."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_index_lists_every_page_once() -> None:
    listed = re.findall(r"^\| \[[^]]+\]\(([^)#]+)\) \|", (ROOT / "docs" / "README.md").read_text(), re.M)
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md")


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_tests_that_pages_name_exist(page: Path) -> None:
    files = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(re.findall(r"\btest_\w+\.py\b", page.read_text())) <= files


@pytest.mark.parametrize("name", ["tuning.md", "migrating.md", "concepts.md"])
def test_settings_that_pages_name_are_settings(name: str) -> None:
    config = RunConfig()
    named = set(re.findall(r"`(?:[\w.]+=)?([a-z]+\.[a-z_]+)(?:=[\w.]+)?`", (ROOT / "docs" / name).read_text()))
    sections = {key for key in vars(config) if hasattr(getattr(config, key), "__dataclass_fields__")}
    for key in named:
        section, field = key.split(".")
        if section in sections:
            assert hasattr(getattr(config, section), field), key


def test_both_languages_show_the_same_commands() -> None:
    english, chinese = ((ROOT / f"README{suffix}.md").read_text() for suffix in ("", ".zh"))
    commands = [
        re.findall(r"^    ((?:flashrl|make|torchrun) [^#\n]*?) *(?:#.*)?$", t, re.M) for t in (english, chinese)
    ]
    assert commands[0] == commands[1]
    assert english.count("\n## ") == chinese.count("\n## ")
