"""`flashrl report`: one page of one or several runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from nemo_flashrl.commands import file_to_write, path


def add_report(commands: argparse._SubParsersAction) -> None:
    """Declare `flashrl report`."""
    report = commands.add_parser(
        "report",
        help="HTML report of one or several runs",
        description="Write one self-contained HTML page: metric curves, findings of the doctor, trajectories. "
        "Runs of one configuration with different seeds are drawn as one curve (mean over seeds) with a band.",
        epilog="example: flashrl report runs/flash-0 runs/flash-1 runs/grpo-0 --output report.html",
    )
    report.add_argument("runs", nargs="+", type=path, metavar="RUN", help="folder of a run, in progress or ended")
    report.add_argument(
        "--output",
        type=file_to_write,
        default=Path("report.html"),
        metavar="FILE",
        help="overwritten if it exists (default report.html)",
    )
    report.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> int:
    from nemo_flashrl.report import write_report

    page = write_report(options.runs, options.output)
    print(f"{page}   {page.stat().st_size / 2**20:.1f} MB, opens in any browser, needs no network")
    return 0
