"""The report: what a person sees in a browser, at full size, with hostile text in it."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import numpy as np
import pytest
from browser import CHROMIUM, browser_page

from nemo_flashrl.cli import main
from nemo_flashrl.report import write_report
from nemo_flashrl.report.run_data import page_data
from nemo_flashrl.run.jsonl import append_json_lines

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"><!--"
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)")


def write_run(
    folder: Path,
    steps: int = 12,
    batch: int = 4,
    *,
    seed: int = 0,
    text: str = "a b c",
    algorithm: str = "flash_reinforce",
) -> Path:
    """A run's files with made-up numbers; the report only has to show them."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    rows, samples, metrics = [], [], []
    (folder / "config.yaml").write_text(f"trainer: {{seed: {seed}}}\nalgorithm: {{name: {algorithm}}}\n")
    for step in range(1, steps + 1):
        level = step / steps
        noise = rng.normal(0, 0.02)
        metrics.append(
            {
                **{"step": step, "reward_mean": level + noise, "reward_std": 0.4, "success": level, "turns": 3.0},
                **{"response_tokens": 900 + 100 * level, "response_tokens_max": 2000.0, "gate_acceptance": 0.98},
                **{
                    "staleness_mean": 0.4,
                    "staleness_max": 1.0,
                    "sequence_kl": 1e-4,
                    "kl": 0.02,
                    "entropy": 1 - level / 2,
                },
                **{"rollout_seconds": 5.0, "train_seconds": 4.0, "refit_seconds": 0.5, "step_seconds": 9.5},
                **{"memory_peak_gib": 60.0, "memory_total_gib": 80.0, "padding_share": 0.03, "action_token_share": 0.4},
                **{
                    "grad_norm": None if step == 3 else 0.5,
                    "episodes_done": 4.0,
                    "dropped_too_old": float(step % 3),
                },
                "reward_histogram": {"edges": [0.0, 0.5, 1.0], "counts": [batch - step % batch, step % batch]},
            }
        )
        for index in range(batch):
            row = {
                **{"step": step, "prompt_index": step * batch + index, "group": 0, "reward": float(index % 2)},
                **{"advantage": 0.5 - index % 2, "turns": 3, "tokens": 2000 + index, "action_tokens": 900},
                **{"end_reason": "done", "repeated_token_share": 0.01, "staleness": 0, "success": True, "info": {}},
            }
            rows.append(row)
            if index < 2:
                segments = [{"kind": "prompt", "text": text, "tokens": 3}]
                segments += [{"kind": "action", "text": text, "tokens": 3, "advantage": 0.5, "logprob": -0.1}]
                samples.append({**row, "segments": segments, "text": text, "info": {"note": text}})
    for name, lines in (("metrics", metrics), ("trajectories", rows), ("samples", samples)):
        append_json_lines(folder / f"{name}.jsonl", lines)
    return folder


def test_seeds_of_one_configuration_are_one_curve(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"flash-s{seed}", seed=seed) for seed in (0, 1)]
    other = write_run(tmp_path / "grpo-s0", algorithm="grpo")
    data = page_data([*runs, other])
    assert data["groups"] == [{"name": "flash", "runs": [0, 1]}, {"name": "grpo-s0", "runs": [2]}]
    assert data["metrics"]["kl"]["unit"] == "nats"
    assert data["runs"][0]["series"]["grad_norm"][2] is None
    assert data["runs"][0]["trajectories"]["sample"][:4] == [0, 1, -1, -1]


def test_more_than_a_page_holds_is_thinned_evenly_and_said(tmp_path: Path, monkeypatch) -> None:
    run = write_run(tmp_path / "run", steps=100)
    monkeypatch.setattr("nemo_flashrl.report.run_data.MAX_TRAJECTORIES", 100)
    monkeypatch.setattr("nemo_flashrl.report.run_data.MAX_SAMPLE_CHARACTERS", 500)
    data = page_data([run])
    table = data["runs"][0]["trajectories"]
    assert 100 <= len(table["step"]) <= 150  # every fourth, and those whose text is kept
    assert len(data["runs"][0]["samples"]) * 10 <= 500
    assert set(table["sample"]) >= set(range(len(data["runs"][0]["samples"])))
    assert "subsampled" in data["trajectory_note"]


def test_text_cannot_end_the_data(tmp_path: Path) -> None:
    page = write_report([write_run(tmp_path / "run", text=HOSTILE)], tmp_path / "r.html").read_text()
    assert page.count("</script>") == 2  # the data's and the code's own
    embedded = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)[1]
    assert json.loads(embedded)["runs"][0]["samples"][0]["segments"][0]["text"] == HOSTILE
    assert re.findall("https?://[^\"' ]*", page) == ["http://www.w3.org/2000/svg"]  # a name; there is nothing to fetch


def test_a_folder_without_metrics_is_refused_in_one_line(tmp_path: Path, capsys) -> None:
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "r.html")]) == 2
    assert capsys.readouterr().err.startswith(f"flashrl report: '{tmp_path}' holds no metrics.jsonl")
    assert not (tmp_path / "r.html").exists()


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_charts_are_drawn_and_read_by_keyboard(tmp_path: Path, dark: bool) -> None:
    runs = [write_run(tmp_path / f"flash-s{seed}", seed=seed, text=HOSTILE) for seed in (0, 1)]
    page_file = write_report([*runs, write_run(tmp_path / "grpo", algorithm="grpo")], tmp_path / "r.html")

    async def look() -> None:
        async with browser_page(height=6000) as page:
            await page.open(page_file, dark=dark)
            await page.frames()
            assert await page.evaluate("document.querySelectorAll('figure').length") >= 20
            assert await page.evaluate(
                "[...document.querySelectorAll('section figure')].every((f) => f.querySelector('path.curve, canvas'))"
            )
            paths = await page.evaluate("[...document.querySelectorAll('path.curve')].map((p) => p.getAttribute('d'))")
            assert len(paths) > 40
            assert not any("NaN" in path or "Infinity" in path for path in paths)
            background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (max(map(int, re.findall(r"\d+", background))) < 60) == dark
            await page.evaluate("document.querySelector('svg.plot').focus()")
            await page.press("ArrowLeft")
            tip = await page.evaluate("document.getElementById('tooltip').textContent")
            assert tip.startswith("step 11")
            assert "2 seeds" in tip
            await page.press("Escape")
            assert await page.evaluate("document.getElementById('tooltip').hidden")
            await page.evaluate("document.querySelector('.browser tbody tr').focus()")
            await page.press("Enter")
            detail = await page.evaluate("document.getElementById('detail').textContent")
            assert HOSTILE in detail
            assert "advantage of each token 0.5" in detail
            curves = await page.evaluate("document.querySelector('figure').querySelectorAll('path.curve').length")
            await page.evaluate("document.querySelector('.chip').click()")
            assert (
                await page.evaluate("document.querySelector('figure').querySelectorAll('path.curve').length")
                == curves - 1
            )
            assert await page.evaluate("document.title") == "Training report"
            assert page.errors == []
            assert [url for url in page.requests if not url.startswith("file://")] == []

    asyncio.run(look())


@needs_browser
def test_a_thousand_steps_and_twenty_thousand_trajectories(tmp_path: Path) -> None:
    """Under 20 MB; usable after less than 3 s of its thread's own time, which a busy machine does not stretch."""
    run = write_run(tmp_path / "run", steps=1000, batch=20, text="word " * 400)
    page_file = write_report([run], tmp_path / "r.html")
    assert page_file.stat().st_size < 20e6

    async def look() -> float:
        async with browser_page() as page:
            await page.call("Performance.enable", timeDomain="threadTicks")
            await page.open(page_file)
            measured = (await page.call("Performance.getMetrics"))["metrics"]
            await page.evaluate("document.querySelector('.filters input[type=checkbox]').click()")
            assert "20000 of 20000" in await page.evaluate("document.querySelector('.browser').textContent")
            assert page.errors == []
            return next(metric["value"] for metric in measured if metric["name"] == "ThreadTime")

    assert 0 < asyncio.run(look()) < 3
