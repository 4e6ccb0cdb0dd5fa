"""`flashrl report` and `flashrl doctor`: their arguments and what they print."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_report(commands: argparse._SubParsersAction) -> None:
    """Declare `flashrl report`."""
    report = commands.add_parser(
        "report",
        help="one HTML page of one or several runs",
        description="Write one self-contained page: curves of all runs, findings of the doctor, trajectories to read. "
        "Runs of one configuration with different seeds are drawn as one curve with a band.",
        epilog="example: flashrl report runs/flash-0 runs/flash-1 runs/grpo-0 --output report.html",
    )
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, still going on or ended")
    report.add_argument(
        "--output", type=Path, default=Path("report.html"), metavar="FILE", help="is replaced (default report.html)"
    )
    report.set_defaults(run=_report)


def add_doctor(commands: argparse._SubParsersAction) -> None:
    """Declare `flashrl doctor`."""
    doctor = commands.add_parser(
        "doctor",
        help="name what is wrong with a run, with the evidence and the setting to change",
        description="Read a run's metrics and name what is wrong: evidence, likely causes, the setting to change. "
        "Exit code 0: nothing found; 1: a rule fires.",
        epilog="example: flashrl doctor runs/first",
    )
    doctor.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, still going on or ended")
    doctor.set_defaults(run=_doctor)


def _report(options: argparse.Namespace) -> int:
    from nemo_flashrl.diagnostics.report import write_report

    page = write_report(options.runs, options.output)
    print(f"{page}   {page.stat().st_size / 2**20:.1f} MB, opens in any browser, needs no network")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from nemo_flashrl.diagnostics.doctor import as_text, examine
    from nemo_flashrl.diagnostics.run_folder import read_run

    found = False
    for folder in options.runs:
        run = read_run(folder)
        findings = examine(run)
        print(as_text(run, findings))
        found = found or bool(findings)
    return 1 if found else 0
