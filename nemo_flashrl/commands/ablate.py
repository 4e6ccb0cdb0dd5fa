"""`flashrl ablate`: its arguments."""

from __future__ import annotations

import argparse
from pathlib import Path

from nemo_flashrl.commands import at_least, path


def add_ablate(commands: argparse._SubParsersAction) -> None:
    """Declare `flashrl ablate`."""
    ablate = commands.add_parser(
        "ablate",
        help="vary one setting at a time from a baseline, over seeds: differences, confidence intervals, cost",
        description="Run a baseline configuration and each value of each varied setting, one at a time, with the "
        "same seeds, and write tables with confidence intervals, costs, convergence, oscillation, pass@k, length trend "
        "and spikes (ablation.md), a picture (ablation.svg) and the numbers (ablation.json). A difference that is not "
        "significant over the seeds is called inconclusive. "
        "Finished runs are kept, an interrupted one is resumed: rerun the same command to do the rest.",
        epilog="example: flashrl ablate rehearsal model.path=warm_start --vary advantage.clip=null,3 "
        "--vary rollout.temperature=1.0,0.85 --seeds 3 --output runs/ablation\n"
        "Exit code 0: all runs are finished; 1: some failed.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ablate.add_argument("config", metavar="CONFIG", help="a .yaml file, or the name of one under conf/experiment")
    ablate.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="overrides for every run")
    ablate.add_argument(
        "--vary", action="append", required=True, metavar="KEY=V1,V2,...", help="a setting and its values; repeatable"
    )
    ablate.add_argument(
        "--seeds", type=at_least(1), default=3, metavar="N", help="trainer.seed 0 to N-1 of each (default 3)"
    )
    ablate.add_argument("--output", type=path, default=Path("runs/ablation"), metavar="DIR", help="folder of all runs")
    ablate.add_argument(
        "--measure",
        default=None,
        metavar="METRIC",
        help="metric to compare (default: evaluation_success, else success)",
    )
    ablate.add_argument(
        "--processes", type=at_least(1), default=1, metavar="N", help="processes of each run (default 1)"
    )
    ablate.add_argument("--plan", action="store_true", help="print the runs and their state; run nothing")
    ablate.set_defaults(run=_ablate)


def _ablate(options: argparse.Namespace) -> int:
    from nemo_flashrl.ablation.cells import plan_cells
    from nemo_flashrl.ablation.run import plan_text, run_cells, write_results

    cells = plan_cells(options.config, options.overrides, options.vary, options.seeds, options.output)
    print(plan_text(cells))
    if options.plan:
        return 0
    failed = run_cells(options.config, cells, options.processes)
    title = f"{Path(options.config).stem}: {', '.join(text.partition('=')[0] for text in options.vary)}"
    print(write_results(cells, options.output, options.measure, title))
    print(f"written: {', '.join(str(options.output / f'ablation.{kind}') for kind in ('md', 'svg', 'json'))}")
    return 1 if failed else 0
