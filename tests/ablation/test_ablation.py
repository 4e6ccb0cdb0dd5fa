"""`flashrl ablate`: what is run, the statistics by hand, the files it leaves."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nemo_flashrl.ablation import run as ablation
from nemo_flashrl.ablation.cells import parse_vary, plan_cells
from nemo_flashrl.ablation.comparison import compare, t_interval
from nemo_flashrl.ablation.run import Cost, cost, is_finished, outcome
from nemo_flashrl.cli import main
from nemo_flashrl.config import load, save
from nemo_flashrl.run.jsonl import append_json_lines
from nemo_flashrl.run.record import read_run

BASE = ["model.path=here", "trainer.steps=20"]


def test_one_variable_at_a_time_from_one_baseline(tmp_path: Path) -> None:
    vary = ["advantage.clip=null,3,5", "rollout.temperature=0.85,1.0"]
    cells = plan_cells("rehearsal", BASE, vary, 2, tmp_path)
    variants = ["baseline", "advantage.clip=3", "advantage.clip=5", "rollout.temperature=0.85"]
    assert [(c.seed, c.variant) for c in cells] == [(seed, v) for seed in (0, 1) for v in variants]
    for cell in cells[2:6]:
        config = load("rehearsal", list(cell.overrides))
        assert (config.trainer.seed, config.output) == (cell.seed, str(cell.folder))
        changed = (config.advantage.clip is not None) + (config.rollout.temperature != 1.0)
        assert changed == (cell.variant != "baseline")
    # A plug-in's default is the baseline too, and so is a value written in another way.
    grpo = plan_cells(
        "rehearsal", [*BASE, "algorithm=grpo"], ["algorithm.settings.normalisation=z_score,none"], 1, tmp_path
    )
    assert [c.variant for c in grpo] == ["baseline", "algorithm.settings.normalisation=none"]
    assert len(plan_cells("rehearsal", BASE, ["algorithm=flash_reinforce,grpo"], 1, tmp_path)) == 2
    for vary, words in (
        (["advantage.clip=null"], "no value differs"), (["advantage.clip"], "must be KEY=V1,V2"),
        (["trainer.seed=1,2"], "sets it itself"), (["advantage.clipp=1"], "unknown key"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            plan_cells("rehearsal", BASE, vary, 1, tmp_path)
    assert parse_vary("a.b=[1,2],'x,y',{z:1,w:2}") == ("a.b", ["[1,2]", "'x,y'", "{z:1,w:2}"])


def test_an_interval_by_hand() -> None:
    """Student's t: 4.302653 at 2 degrees of freedom, 12.7062 at 1; sd of 1, 2, 3 is 1."""
    own = t_interval([1.0, 2.0, 3.0])
    half = 4.302653 / 3**0.5
    assert (own.mean, own.low, own.high) == pytest.approx((2.0, 2 - half, 2 + half), rel=1e-6)
    two = t_interval([0.0, 1.0])
    assert two.high - 0.5 == pytest.approx(12.706205 * 0.5**0.5 / 2**0.5, rel=1e-6)
    assert t_interval([5.0]).low == -math.inf


def test_what_the_seeds_do_not_support_is_not_called() -> None:
    """Seeds differ much, the variant little: only the paired differences tell."""
    base = {0: 0.10, 1: 0.50, 2: 0.90}
    values = {
        "baseline": base,
        "steady": {seed: v + d for (seed, v), d in zip(base.items(), (0.05, 0.06, 0.05), strict=True)},
        "noisy": {seed: v + d for (seed, v), d in zip(base.items(), (0.30, -0.10, 0.20), strict=True)},
        "worse": {seed: v - d for (seed, v), d in zip(base.items(), (0.05, 0.06, 0.05), strict=True)},
    }
    rows = {row.variant: row for row in compare(values, "baseline")}
    assert {name: row.verdict for name, row in rows.items()} == {
        "baseline": "", "steady": "higher", "noisy": "inconclusive", "worse": "lower"
    }  # fmt: skip
    # Unpaired, the intervals of baseline and "steady" overlap wholly: the wrong way sees nothing.
    assert rows["steady"].own.low < rows["baseline"].own.mean < rows["steady"].own.high
    # Three comparisons: t at 1 - 0.05 / 3, two degrees of freedom, is 7.6488.
    differences = np.array([0.05, 0.06, 0.05])
    half = 7.648842 * differences.std(ddof=1) / 3**0.5
    assert rows["steady"].difference.low == pytest.approx(differences.mean() - half, rel=1e-5)
    assert rows["baseline"].difference is None
    few = {name: {seed: own[seed] for seed in (0, 1)} for name, own in values.items()}
    assert {row.verdict for row in compare(few, "baseline")} == {"", "inconclusive"}
    missing = compare({"baseline": {0: 1.0}, "other": {1: 2.0}}, "baseline")[1]
    assert (missing.difference, missing.verdict, missing.seeds) == (None, "inconclusive", 0)


def test_chance_is_called_a_difference_in_one_ablation_of_twenty() -> None:
    """Without the correction for four variants it would be one in six."""
    rng, called = np.random.default_rng(0), 0
    for _ in range(200):
        values = {name: dict(enumerate(rng.normal(size=5))) for name in ("baseline", "a", "b", "c", "d")}
        called += any(row.verdict in ("higher", "lower") for row in compare(values, "baseline"))
    assert 3 <= called <= 18


def write_run(folder: Path, steps: list[dict], rows: list[dict]) -> None:
    folder.mkdir(parents=True)
    append_json_lines(folder / "metrics.jsonl", steps)
    append_json_lines(folder / "trajectories.jsonl", rows)


def test_costs_by_hand(tmp_path: Path) -> None:
    """Step 1: two have an advantage, the gate admits half; step 2: one has. 2 * 0.5 + 1 = 2. Six episodes ended."""
    steps = [
        {"step": 1, "step_seconds": 3.0, "effective_samples": 2.0, "gate_acceptance": 0.5, "episodes_done": 4.0},
        {"step": 2, "step_seconds": 5.0, "effective_samples": 1.0, "episodes_done": 1.0, "episodes_turn_limit": 1.0},
    ]
    steps[0]["episodes_in_flight"] = 9.0
    write_run(tmp_path / "run", steps, [{"step": 1, "tokens": 10}] * 5)
    spent = cost(read_run(tmp_path / "run"))
    assert spent == Cost(samples=6, tokens=50, seconds=8.0, effective=2.0)
    assert [spent.per_effective(what) for what in ("samples", "tokens", "seconds")] == [3.0, 25.0, 4.0]
    assert Cost(1, 1, 1.0, 0).per_effective("seconds") == math.inf


def test_the_outcome_is_the_mean_of_the_last_tenth(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [{"step": n, "success": n / 20} for n in range(1, 21)], [])
    assert outcome(read_run(tmp_path / "a"), None) == ("success", pytest.approx(0.975))  # steps 19 and 20
    held = [{"step": n, "success": 0.0, **({"evaluation_success": n} if n % 5 == 0 else {})} for n in range(1, 21)]
    write_run(tmp_path / "b", held, [])
    assert outcome(read_run(tmp_path / "b"), None) == ("evaluation_success", 20.0)
    with pytest.raises(ValueError, match="--measure nothing"):
        outcome(read_run(tmp_path / "b"), "nothing")


def test_runs_are_kept_and_compared(tmp_path: Path, monkeypatch, capsys) -> None:
    """The command with stand-in runs: success rises by 0.2 with the clip, at any seed; one run fails at first."""
    started = []
    base = ["output=x", *BASE]
    configs = {clip: load("rehearsal", base + ["advantage.clip=3"] * clip) for clip in (False, True)}

    def stand_in(name, overrides, processes, environment, log):
        given = dict(override.split("=", 1) for override in overrides)
        config = replace(configs["advantage.clip" in given], output=given["output"].strip("'"))
        config.trainer.seed = config.environment.settings["seed"] = int(given["trainer.seed"])
        started.append((config.trainer.seed, config.advantage.clip))
        if started == [(0, None), (0, 3.0)]:
            raise RuntimeError("training ended with exit code 1")
        success = 0.3 + 0.1 * config.trainer.seed + 0.2 * (config.advantage.clip is not None)
        success += 0.01 * (config.trainer.seed == 1 and config.advantage.clip is not None)
        steps = [{"step": n, "step_seconds": 1.0, "success": success, "effective_samples": 1.0} for n in range(1, 21)]
        write_run(Path(config.output), steps, [{"step": 1, "tokens": 7}])
        save(config, Path(config.output) / "config.yaml")

    monkeypatch.setattr(ablation, "run_training", stand_in)
    command = ["ablate", "rehearsal", *BASE, "--vary", "advantage.clip=null,3", "--output", str(tmp_path / "out")]
    assert main(command) == 1
    assert "advantage.clip=3 seed 0 failed" in capsys.readouterr().out
    assert main(command) == 0
    assert len(started) == 7 and started[-1] == (0, 3.0)
    text = capsys.readouterr().out
    assert text.count(": kept") == 5
    assert "Significant over these seeds: success is higher with advantage.clip=3." in text
    assert (tmp_path / "out" / "ablation.md").read_text() in text
    results = json.loads((tmp_path / "out" / "ablation.json").read_text())
    assert len(results) == 6 and results[0]["cost"]["tokens"] == 7
    picture = ElementTree.fromstring((tmp_path / "out" / "ablation.svg").read_text())
    assert len(picture.findall("{http://www.w3.org/2000/svg}circle")) == 6
    command.insert(2, "rollout.temperature=0.9")
    assert main(command) == 2  # kept runs are of another baseline
    assert "the run there has other settings under rollout: choose another --output" in capsys.readouterr().err


def test_nothing_is_told_without_a_baseline(tmp_path: Path) -> None:
    cells = plan_cells("rehearsal", BASE, ["advantage.clip=3"], 1, tmp_path)
    assert not is_finished(cells[0])
    assert ablation.plan_text(cells).startswith("2 runs of 20 steps\n  baseline          seed 0  to do ")
    with pytest.raises(ValueError, match="no run of the baseline is finished"):
        ablation.write_results(cells, tmp_path, None, "title")
