"""The picture of `make demo` in README.md: success of each update's own trajectories, and held-out success around them.

python benchmarks/demo_curve.py --demo runs/demo --picture docs/images/demo_curve.svg
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from rehearsal_compare import COLOURS, HEIGHT, LEFT, SIZE, TOP, WIDTH, panel

from nemo_flashrl.ablation.picture import document, line, text
from nemo_flashrl.run.jsonl import read_json_lines
from nemo_flashrl.run.record import read_run

sys.path.append(str(Path(__file__).parents[1] / "examples/demo"))
from held_out import wilson

HELD_OUT = COLOURS[1]


def held_out(file: Path, x: float) -> list[str]:
    """Success on the tasks of a file of held_out.py, with its 95% interval, as a point at `x` pixels."""
    solved = [answer["solved"] for answer in read_json_lines(file) if "task" in answer]
    share, (low, high) = sum(solved) / len(solved), wilson(sum(solved), len(solved))
    y, bottom, top = (TOP + (1 - value) * HEIGHT for value in (share, low, high))
    anchor, at = ("start", (x + 8, y + 18)) if x < LEFT + WIDTH / 2 else ("end", (x - 8, y - 8))
    said = f"{share:.1%} of {len(solved)} held-out tasks"
    return [
        line(x, bottom, x, top, HELD_OUT),
        f'<circle cx="{x:.0f}" cy="{y:.1f}" r="4" fill="{HELD_OUT}"/>',
        text(*at, said, anchor=anchor, weight="bold", fill=HELD_OUT),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, required=True)
    parser.add_argument("--picture", type=Path, required=True)
    options = parser.parse_args()
    run = read_run(options.demo / "run")
    curve = run.column("step"), np.array([run.column("success")])
    seconds = run.column("step_seconds").sum()
    title = f"SmolLM2-135M-Instruct with a calculator: {seconds:.0f} s of training on two CPU cores"
    parts = panel([curve], ["success of an update's own trajectories"], title, "update")
    parts += held_out(options.demo / "before.jsonl", LEFT + 2)
    parts += held_out(options.demo / "after.jsonl", LEFT + WIDTH)
    options.picture.write_text(document(parts, *SIZE))


if __name__ == "__main__":
    main()
