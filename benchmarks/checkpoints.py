"""What a checkpoint of the rehearsal costs: seconds to write and to read back, bytes, and what a step takes beside it.

    python benchmarks/checkpoints.py --runs runs/checkpoints

Every row is one `flashrl train` that saves after each of 20 steps, and one that resumes from the last.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
from pathlib import Path

from nemo_flashrl.rehearsal.warm_start import make_warm_start
from nemo_flashrl.run.jsonl import read_metrics

STEPS = 20
ROWS = {  # processes, overrides
    "one process": (1, []),
    "one process, EMA reference": (1, ["reference.mode=ema", "kl.coefficient=0.01"]),
    "TP 2 x PP 2": (4, ["parallel.tensor=2", "parallel.pipeline=2"]),
}


def train(folder: Path, processes: int, *overrides: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    command += ["nemo_flashrl.cli", "train", "rehearsal", f"output={folder}", *overrides]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
    return done.stdout + done.stderr


def seconds(log: str, words: str) -> list[float]:
    """NeMo's own readings."""
    return [float(value) for value in re.findall(rf"{words} ?: ([0-9.]+)s", log)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True, help="folder to run in; must not exist")
    runs = parser.parse_args().runs
    warm_start = make_warm_start(runs / "warm_start")
    print(
        "| layout | files, kB | write, s (median, max) | read, s | step, s (median) |\n| --- | --- | --- | --- | --- |"
    )
    for name, (processes, overrides) in ROWS.items():
        folder = runs / name.replace(" ", "_").replace(",", "")
        settings = [f"model.path={warm_start}", "checkpoint.every_steps=1", *overrides]
        written = seconds(train(folder, processes, f"trainer.steps={STEPS}", *settings), "Save duration")
        read = seconds(
            train(folder, processes, f"trainer.steps={STEPS + 1}", *settings), "Time spent in load_checkpoint"
        )
        size = sum(
            file.stat().st_size for file in (folder / "checkpoints" / f"step={STEPS}").rglob("*") if file.is_file()
        )
        step = statistics.median(row["step_seconds"] for row in read_metrics(folder / "metrics.jsonl"))
        print(
            f"| {name} | {size / 1000:.0f} | {statistics.median(written):.3f}, {max(written):.3f} | "
            f"{max(read):.3f} | {step:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
