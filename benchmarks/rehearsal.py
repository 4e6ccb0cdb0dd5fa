"""Does the rehearsal learn? Success over seeds, stale samplers with and without their corrections, GRPO beside it.

    python benchmarks/rehearsal.py seeds  --runs runs/seeds          # 5 seeds, FlashREINFORCE
    python benchmarks/rehearsal.py grpo   --runs runs/grpo           # 5 seeds, GRPO G=8, as many trajectories
    python benchmarks/rehearsal.py lag    --runs runs/lag            # lag 4 and 16; corrected, ratio only, neither
    python benchmarks/rehearsal.py techniques --runs runs/techniques --seeds 0 1 2    # FlashREINFORCE beyond the paper
    python benchmarks/rehearsal.py table  --runs runs/seeds runs/grpo runs/lag

`rehearsal_compare.py` holds the first two against each other.

Every run is `flashrl rehearse` in processes of its own. Finished runs are kept and not run again.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

UNCORRECTED = ["algorithm.settings.importance_sampling=false", "algorithm.settings.delta=inf"]
RATIO_ONLY = ["algorithm.settings.delta=inf"]
GUARD_OFF = "algorithm.settings.ratio_guard=inf"
TECHNIQUES = {
    "plain": [],
    "window": ["algorithm.settings.baseline=window"],
    "both": ["algorithm.settings.baseline=both"],
    "normalise": ["algorithm.settings.normalise=true"],
    "both-normalise": ["algorithm.settings.baseline=both", "algorithm.settings.normalise=true"],
    "turns": ["advantage.turn_coefficient=1", "advantage.turn_discount=0.9"],
    "entropy": ["algorithm.settings.negative_token_fraction=0.2"],
    "value_head": ["value_head.learning_rate=0.05"],
    "updates2": ["rollout.updates_per_batch=2"],  # as many steps, half as many trajectories
    "ratio_clip": ["algorithm.settings.ratio_clip=0.1", "algorithm.settings.delta=inf", "rollout.lag=4"],
    "no_ratio_clip": ["algorithm.settings.delta=inf", "rollout.lag=4"],  # what the line before is compared with
}


def plans(kind: str, seeds: list[int]) -> dict[str, list[str]]:
    """Run name -> arguments of `flashrl rehearse`."""
    if kind == "seeds":
        return {f"seed{s}": ["--seed", str(s)] for s in seeds}
    if kind == "grpo":
        return {f"seed{s}": ["--seed", str(s), "--algorithm", "grpo"] for s in seeds}
    if kind == "techniques":
        return {f"{n}-seed{s}": ["--seed", str(s), *overrides] for s in seeds for n, overrides in TECHNIQUES.items()}
    corrections = {"both": [], "ratio": RATIO_ONLY, "neither": [*UNCORRECTED, GUARD_OFF]}
    return {
        f"lag{lag}-{name}-seed{s}": ["--seed", str(s), f"rollout.lag={lag}", *overrides]
        for s in seeds
        for lag in (4, 16)
        for name, overrides in corrections.items()
    }


def run(folder: Path, arguments: list[str]) -> None:
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "nemo_flashrl.cli", "rehearse", "--output", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if not (folder / "run" / "checkpoint").is_dir():
        raise SystemExit(f"{folder.name} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    (folder / "summary.json").write_text(
        json.dumps({"text": done.stdout, "seconds": seconds, "processor_seconds": processor})
    )


def row(folder: Path) -> list[str]:
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    success = [s["success"] for s in steps]
    gate = [s["gate_acceptance"] for s in steps if "gate_acceptance" in s]
    return [
        f"{folder.parent.name}/{folder.name}",
        f"{success[0]:.3f}",
        f"{statistics.mean(success[40:60]):.3f}",
        f"{statistics.mean(success[-20:]):.3f}",
        f"{greedy_success(summary):.1%}",
        f"{statistics.mean(gate):.3f}" if gate else "",
        f"{max(s['memory_peak_gib'] for s in steps):.2f}",
        f"{summary['processor_seconds']:.0f}",
        f"{summary['seconds']:.0f}",
    ]


def greedy_success(summary: Mapping[str, Any]) -> float:
    """Of the exported checkpoint on held-out tasks, as the page of a rehearsal says it."""
    line = next(line for line in summary["text"].splitlines() if "greedy" in line)
    return float(line.split(",")[-1].split()[0].rstrip("%")) / 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["seeds", "grpo", "lag", "techniques", "table"])
    parser.add_argument("--runs", type=Path, nargs="+", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    options = parser.parse_args()
    if options.kind != "table":
        for name, arguments in plans(options.kind, options.seeds).items():
            folder = options.runs[0] / name
            if not (folder / "summary.json").exists():
                run(folder, arguments)
                print(*row(folder), sep=" | ", flush=True)
        return
    print("| run | first update | updates 41-60 | last 20 | greedy | gate acceptance | peak GiB | cpu s | s |")
    print("|" + " --- |" * 9)
    for folder in sorted(f for root in options.runs for f in root.iterdir() if (f / "summary.json").exists()):
        print("| " + " | ".join(row(folder)) + " |")


if __name__ == "__main__":
    main()
