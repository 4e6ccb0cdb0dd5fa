"""`flashrl ablate`: what is run, the statistics by hand, the files it leaves."""

from __future__ import annotations

import json
import math
import statistics
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nemo_flashrl.ablation import run as ablation
from nemo_flashrl.ablation.cells import parse_vary, plan_cells
from nemo_flashrl.ablation.comparison import Cost, compare, convergence, slope, spikes, spikes_of, t_interval
from nemo_flashrl.ablation.run import cost, is_finished, outcome, pass_at_k
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


def test_convergence_and_oscillation_by_hand() -> None:
    """From 0 (steps 1, 2) to 1 (steps 19, 20): the means of steps 5-9 and 6-10 are 0.88 and 0.94, so step 10.

    From it on six values of 0.9 and five of 1.1, level: residuals of 0.0909 and 0.1091, squares 12/110, over 11 - 2.
    """
    steps = np.arange(1.0, 21.0)
    values = np.array([0, 0, 0.2, 0.4, 0.6, 0.7, *[1.1, 0.9] * 7])
    right = (10.0, pytest.approx((12 / 110 / 9) ** 0.5), pytest.approx(0.2))
    assert convergence(steps, values) == right
    assert convergence(steps, -3 - values) == right  # a reward below 0, and one that falls
    assert convergence(steps, np.full(20, 0.5)) == (None, None, None)
    assert convergence(steps[:9], values[:9]) == (None, None, None)
    assert convergence(steps[:10], steps[:10] ** 9) == (None, None, None)  # still far away in the mean of the last five
    assert convergence(steps[:10], np.array([0.0] * 4 + [10.0] * 6)) == (9.0, None, None)  # two points are a line


def test_convergence_and_slope_against_a_plain_reference() -> None:
    rng = np.random.default_rng(1)
    for length in (10, 31, 60, 200):
        steps = np.cumsum(rng.integers(1, 4, size=length)).astype(float)  # some steps are missing
        values = 1 - np.exp(-steps / 20) + 0.05 * rng.normal(size=length) + 0.001 * steps
        tenth = max(1, round(length / 10))
        start, end = values[:tenth].mean(), values[-tenth:].mean()
        means = {n: values[n - 4 : n + 1].mean() for n in range(4, length)}
        first = next((n for n, mean in means.items() if mean - start >= 0.9 * (end - start)), None)
        step, deviation, amplitude = convergence(steps, values)
        assert step == (None if first is None else steps[first])
        if first is not None and length - first >= 3:
            left = values[first:] - np.polyval(np.polyfit(steps[first:], values[first:], 1), steps[first:])
            assert deviation == pytest.approx(math.sqrt(sum(left**2) / (len(left) - 2)))
            assert amplitude == pytest.approx(max(left) - min(left))
        assert slope(steps, values) == pytest.approx(np.polyfit(steps, values, 1)[0])
    assert slope(np.array([1.0, 2.0, 4.0]), np.array([30.0, 32.0, 36.0])) == pytest.approx(2.0)
    assert slope(np.array([1.0, 2.0]), np.array([30.0, 32.0])) is None


def test_spikes_by_hand() -> None:
    """Median 1.1, MAD 0.1: more than 1.7 is a spike, of whatever sign; what is not finite is one too."""
    usual = [1.0, 1.2] * 5
    for value, is_one in ((1.69, False), (1.71, True), (-1.71, True), (math.nan, True), (math.inf, True)):
        assert spikes([*usual, value]) == ({10} if is_one else set())
    assert spikes(usual) is None and spikes([]) is None  # ten are needed before
    assert spikes([1.0] * 10 + [1.05, 1.07]) == {11}  # of a constant the MAD is taken to be 0.01
    assert spikes([0.0] * 10 + [1e-7, 1e-5]) == {11}  # a loss of rounding errors
    # Twenty values back: an older level is forgotten.
    assert spikes([100.0, 120.0] * 5 + usual * 2 + [2.0]) == {30}
    records = [{"step": n, "grad_norm": usual[n % 2], "loss": 0.5} for n in range(1, 13)]
    records[10] |= {"grad_norm": None, "loss": 0.9}
    records[11]["grad_norm"] = 9.0
    assert spikes_of(records) == [2, 2, 1, None]
    assert spikes_of(records[:3]) == [None] * 4


def test_spikes_against_a_plain_reference() -> None:
    values = np.random.default_rng(2).standard_t(2, size=300)
    right = set()
    for place in range(10, 300):
        before = [abs(v) for v in values[max(0, place - 20) : place]]
        middle = statistics.median(before)
        mad = statistics.median(abs(v - middle) for v in before)
        if abs(values[place]) > middle + 6 * mad:
            right.add(place)
    assert spikes(values) == right and 5 < len(right) < 60


def rollouts(step: int, *groups: str) -> list[dict]:
    """A group a word, a rollout a letter: x solved."""
    return [
        {"step": step, "group": 10 * step + n, "tokens": 1, "success": letter == "x"}
        for n, word in enumerate(groups)
        for letter in word
    ]


def test_pass_at_k_of_groups_and_of_held_out_tasks(tmp_path: Path) -> None:
    """Of the last tenth of 20 steps, 19 and 20: 1 - C(3, 2) / C(4, 2) = 1/2, 1, 0 and 1 at k = 2."""
    steps = [{"step": n, "success": 0.0} for n in range(1, 21)]
    four = [*rollouts(1, "xxxx"), *rollouts(19, "x...", "xx.x"), *rollouts(20, "....", "xxxx")]
    write_run(tmp_path / "four", steps, four)
    write_run(tmp_path / "two", steps, [*rollouts(19, "x."), *rollouts(20, "..", "x", "xx", *[".."] * 8)])
    write_run(tmp_path / "one", steps, rollouts(20, "x", ".", "x"))
    runs = [read_run(tmp_path / name) for name in ("four", "two", "one")]
    assert pass_at_k(runs[:1]) == ("pass@4 (groups)", [pytest.approx(3 / 4)])
    # One k for all; of the second run one group in twelve lost a rollout, and is left out.
    assert pass_at_k(runs) == ("pass@2 (groups)", [pytest.approx(2.5 / 4), pytest.approx(2 / 11), None])
    assert pass_at_k(runs[2:]) == ("pass@k", [None])
    assert pass_at_k([]) == ("pass@k", [])
    for name, sampled in (("a", (2, 8)), ("b", (8,))):
        held = [step | {f"evaluation_pass_at_{k}": step["step"] / 20 + k for k in sampled} for step in steps]
        write_run(tmp_path / name, held, four)
    both = [read_run(tmp_path / name) for name in ("a", "b")]
    assert pass_at_k(both) == ("pass@8 (held-out)", [pytest.approx(8.975)] * 2)
    assert pass_at_k([both[0], runs[0]])[0] == "pass@4 (groups)"  # what all have


def test_short_and_failed_runs_are_shown(tmp_path: Path) -> None:
    """Runs of two steps have no indicator; one of twelve with a null grad norm has; one failed and one was cut off."""
    cells = plan_cells(
        "rehearsal", ["model.path=here", "trainer.steps=12"], ["rollout.temperature=0.85,0.9"], 2, tmp_path
    )
    for cell in cells:
        record = {"success": 0.5, "effective_samples": 1.0, "step_seconds": 1.0, "loss": 0.1}
        if cell.variant.endswith("0.9"):
            steps = [record | {"step": 1}, record | {"step": 12, "effective_samples": None}]
        else:
            steps = [record | {"step": n, "trajectory_tokens": 30.0 + (1 + cell.seed) * n} for n in range(1, 13)]
            steps[11] |= {"grad_norm": None, "evaluation_success": 0.9}
        write_run(cell.folder, steps[: 2 if (cell.variant, cell.seed) == ("baseline", 1) else 12], [])
    (cells[2].folder / "trajectories.jsonl").unlink()
    text = ablation.write_results(cells, tmp_path, None, "title")
    tables = [[part.strip() for part in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert max(map(len, text.splitlines())) <= 120
    assert tables[0][:3] == ["variant", "seeds", "success [95%]"]  # which one variant has, and not evaluation_success
    row = {part[0]: part[1:] for part in tables[-3:]}
    # Slopes of 1 and 2: 1.5 +- 12.7062 * 0.7071 / sqrt 2; one seed has no interval.
    assert row["rollout.temperature=0.85"] == ["-", "1.5 [-4.85, 7.85]", "0 [0, 0]"]
    assert row["baseline"] == ["-", "1", "0"]
    assert row["rollout.temperature=0.9"] == ["-", "-", "-"]
    results = json.loads((tmp_path / "ablation.json").read_text())
    assert results[0]["indicators"] == {
        "steps_to_90": None, "oscillation": None, "amplitude": None, "pass_at_k": None, "tokens_per_step": 1.0,
        "spikes": 0, "grad_norm_spikes": None, "loss_spikes": 0, "kl_spikes": None,
    }  # fmt: skip


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
