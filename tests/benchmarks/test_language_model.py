"""FlashREINFORCE beside GRPO on a language model: how runs are cut, and what the kept metrics come to."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import language_model
import numpy as np
import pytest
from paths import ROOT

from nemo_flashrl.run.record import RunRecord

KEPT = ROOT / "docs/results"


def write_run(folder: Path, seconds: list[float], success: list[float]) -> RunRecord:
    """Two trajectories an update; the last update is followed by an evaluation of 5 s."""
    folder.mkdir(parents=True)
    steps = [
        {"step": n, "step_seconds": own, "success": share}
        for n, (own, share) in enumerate(zip(seconds, success, strict=True), 1)
    ]
    steps[-1] = {**steps[-1], "step_seconds": steps[-1]["step_seconds"] + 5, "evaluating_seconds": 5.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    rows = [{"step": step["step"], "tokens": tokens} for step in steps for tokens in (10, 30)]
    (folder / "trajectories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return language_model.read_run(folder)


def test_runs_are_cut_where_the_quicker_one_ends(tmp_path: Path) -> None:
    """The quicker run ends at 8 s. The other has done two of its four updates by then, with success 0.25 and 0.5."""
    quick = write_run(tmp_path / "quick", [2, 2, 2, 2], [0, 0.5, 0.5, 1])
    slow = write_run(tmp_path / "slow", [4, 4, 4, 4], [0.25, 0.5, 1, 1])
    seconds, trajectories, success, ratio = (row[2] for row in language_model.at_equal_time([[quick], [slow]]))
    assert seconds == [[8], [8]]
    assert trajectories == [[8], [4]]
    assert success == [[pytest.approx(2 / 3)], [pytest.approx(0.375)]]
    assert ratio == [[1], [2]]
    grid, values = language_model.by_second([quick, slow], [])
    assert (grid[0], grid[-1]) == (4, 8)
    assert values[:, 0].tolist() == [0.5, 0.25] and values[:, -1].tolist() == [1, 0.5]


def test_padding_of_one_row_each(tmp_path: Path) -> None:
    """Rows of 10 and 30 tokens fill 40 of 60 places."""
    assert language_model.padding_of_one_row_each(write_run(tmp_path / "run", [1, 1], [0, 1])) == pytest.approx(1 / 3)


def test_the_kept_metrics_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row of the printed table, from the files by hand; docs/results.md has the same row."""
    language_model.show(Namespace(kept=KEPT, picture=tmp_path / "picture.svg"))
    printed = capsys.readouterr().out
    for algorithm in language_model.ALGORITHMS:
        files = sorted((KEPT / "demo-bf16" / "sync" / algorithm).glob("*/metrics.jsonl"))
        ends = [json.loads(file.read_text().splitlines()[-1])["evaluation_success"] for file in files]
        assert len(ends) >= 3
        assert f"{np.mean(ends):.3f} [" in next(
            line
            for line in printed.partition("### demo-bf16, sync")[2].splitlines()
            if line.startswith("| held-out success after the last update")
        )
    page = (ROOT / "docs/results.md").read_text()
    lines = [line for line in printed.splitlines() if line.startswith("| held-out success after the last update")]
    assert all(line in page for line in lines)
    assert (tmp_path / "picture.svg").read_text() == (ROOT / "docs/images/language_model.svg").read_text()
