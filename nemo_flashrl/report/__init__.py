"""`flashrl report`: runs -> one HTML page that needs no network. Python reads and thins the data, the page draws it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_flashrl.report.run_data import page_data

HERE = Path(__file__).parent
SCRIPTS = ("charts.js", "page.js", "browser.js", "main.js")


def write_report(runs: Sequence[Path], output: Path) -> Path:
    """Write the page of `runs`, folders with a `metrics.jsonl` in them or in their `run/`; returns `output`.

    Raises:
        ValueError: a folder that holds no metrics.
    """
    page = build_page(page_data(runs))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page, encoding="utf-8", errors="replace")
    return output


def build_page(data: dict[str, Any]) -> str:
    """The page with `data` in it.

    Text from a trajectory is untrusted: no `<` of the data stands in the page as one, so none can end the element that
    holds it, and the scripts hand every text to the page as text.
    """
    embedded = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")
    scripts = "\n".join((HERE / name).read_text(encoding="utf-8") for name in SCRIPTS)
    before, marker, after = (HERE / "page.html").read_text(encoding="utf-8").partition("/*DATA*/")
    assert marker, "page.html has no place for the data"
    before = before.replace("/*STYLE*/", (HERE / "style.css").read_text(encoding="utf-8"))
    return before + embedded + after.replace("/*SCRIPT*/", scripts)
