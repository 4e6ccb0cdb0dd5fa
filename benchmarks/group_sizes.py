"""Group sizes of each prompt's own history beside a fixed G, on the rehearsal's task, seed against the same seed.

    python benchmarks/group_sizes.py --runs DIR --seeds 5

trains a warm start for each seed, then does what `flashrl ablate` does, from GRPO with G = 8: 60 updates of 64
trajectories, on 64 tasks that come again, with groups of 2 to 16 and of 4 to 16. What is finished in DIR is kept: rerun
the same command to do the rest. Success is measured on held-out tasks: in the training batches, prompts that are
neither solved nor hopeless count more often when they get more rollouts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rehearsal_compare import shown

from nemo_flashrl.ablation.cells import Cell, plan_cells
from nemo_flashrl.ablation.comparison import t_interval
from nemo_flashrl.ablation.run import run_cells
from nemo_flashrl.rehearsal.warm_start import make_warm_start
from nemo_flashrl.run.jsonl import read_json_lines
from nemo_flashrl.run.record import RunRecord, read_run

LEARNT = 0.8  # held-out success whose first trajectory is counted
SETTINGS = (
    "algorithm=grpo",
    "trainer.steps=60",
    "environment.settings.num_tasks=64",
    "evaluation.every_steps=6",
    "evaluation.tasks=128",
    "evaluation.settings.seed=1073741824",
    "evaluation.settings.num_tasks=128",
    "checkpoint.every_steps=0",
)
VARIED = ("group_size.max=16", "group_size={min:4,max:16}")


def held_out(run: RunRecord) -> tuple[np.ndarray, np.ndarray]:
    """Trajectories trained on, and success, at each evaluation."""
    success = run.column("evaluation_success")
    measured = np.isfinite(success)
    return 64 * run.column("step")[measured], success[measured]


def learnt_after(run: RunRecord) -> float:
    """Trajectories until held-out success reaches LEARNT, linear between evaluations; all of them if it never does."""
    trajectories, success = held_out(run)
    reached = np.flatnonzero(success >= LEARNT)
    if not len(reached):
        return float(trajectories[-1])
    place = reached[0]
    if place == 0:
        return float(trajectories[0])
    return float(np.interp(LEARNT, success[place - 1 : place + 1], trajectories[place - 1 : place + 1]))


def in_tied_groups(run: RunRecord) -> float:
    """Trajectories whose group's rewards were all equal."""
    groups: dict[tuple[int, int], list[float]] = {}
    for row in read_json_lines(run.trajectories):
        groups.setdefault((row["step"], row["group"]), []).append(row["reward"])
    return float(sum(len(rewards) for rewards in groups.values() if min(rewards) == max(rewards)))


def saved(run: RunRecord) -> float:
    """Trajectories that groups of equal rewards had fewer than with G = 8 each."""
    return float(run.column("tied_trajectories_saved").sum()) if run.has("tied_trajectories_saved") else 0.0


ROWS: dict[str, tuple[str, Callable[[RunRecord], float]]] = {  # title -> (format, of a run)
    "trajectories trained on": (".0f", lambda run: sum(1 for _ in read_json_lines(run.trajectories))),
    "of these, with an advantage that is not 0": (".0f", lambda run: run.column("effective_samples").sum()),
    "of these, in groups of equal rewards": (".0f", in_tied_groups),
    "fewer in groups of equal rewards than with G = 8 each": (".0f", saved),
    "groups of equal rewards, mean of all updates": (".3f", lambda run: run.column("tied_groups").mean()),
    "group size, mean of all updates": (".2f", lambda run: run.column("group_size").mean()),
    "group size, last 10 updates": (".2f", lambda run: run.column("group_size")[-10:].mean()),
    "held-out success, mean of all evaluations": (".3f", lambda run: held_out(run)[1].mean()),
    "held-out success after the last update": (".3f", lambda run: held_out(run)[1][-1]),
    f"trajectories until held-out success is {LEARNT}": (".0f", learnt_after),
    "gradient norm, mean": (".2f", lambda run: run.column("grad_norm").mean()),
}


def table(cells: list[Cell]) -> str:
    """Means with 95% intervals over seeds, of each variant and of its differences to the first, seed by seed."""
    variants: dict[str, list[RunRecord]] = {}
    for cell in cells:
        variants.setdefault(cell.variant, []).append(read_run(cell.folder))
    first, *others = variants
    head = ["", f"{first}, G = 8", *(title for name in others for title in (name, "difference"))]
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for title, (form, of) in ROWS.items():
        values = {name: np.array([of(run) for run in runs]) for name, runs in variants.items()}
        told = [shown(t_interval(values[first]), form)]
        for name in others:
            told += [shown(t_interval(part), form) for part in (values[name], values[name] - values[first])]
        lines.append(f"| {title} | {' | '.join(told)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    starts = options.runs / "warm_start"
    for seed in range(options.seeds):
        if not (starts / str(seed)).exists():
            make_warm_start(starts / f"{seed}.part", seed)
            (starts / f"{seed}.part").rename(starts / str(seed))
    settings = [*SETTINGS, f"model.path='{starts.absolute()}/${{trainer.seed}}'"]
    cells = plan_cells("rehearsal", settings, VARIED, options.seeds, options.runs.absolute())
    if failed := run_cells("rehearsal", cells, processes=1):
        raise SystemExit(f"failed: {', '.join(str(cell.folder) for cell in failed)}")
    print(table(cells))


if __name__ == "__main__":
    main()
