"""Every check of this folder, on the GPU of this machine, and one JSON of what they found.

    python tests/gpu/check.py                  ended after 8 minutes
    python tests/gpu/check.py --quick          after 3
    python tests/gpu/check.py --fake --quick   without a GPU: the same code on fake CUDA, without values and times

It takes the Python that it is started with, and nothing beside the trainer's own packages but pytest. Exit code 0 where
nothing failed, 1 where something did, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import warnings
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller sizes")
    parser.add_argument("--fake", action="store_true", help="rehearse on fake CUDA")
    parser.add_argument("--report", default="gpu_check.json", help="where the JSON goes (default: %(default)s)")
    options, others = parser.parse_known_args()
    missing = [name for name in ("torch", "pytest") if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"{sys.executable} has no {' and no '.join(missing)}: start it with the trainer's Python", file=sys.stderr
        )
        return 2
    if not options.fake and (reason := no_gpu()):
        print(f"{reason}; --fake (make gpu-check FAKE=1) rehearses the checks without one", file=sys.stderr)
        return 2
    import pytest

    arguments = [str(FOLDER), "--confcutdir", str(FOLDER), "--rootdir", str(FOLDER), "-c", "/dev/null"]
    arguments += ["-q", "-rfEs", "--tb=short", "-p", "no:cacheprovider", "--report", options.report]
    arguments += [f"--{name}" for name in ("quick", "fake") if getattr(options, name)]
    code = pytest.main([*arguments, *others])
    report = json.loads(Path(options.report).read_text())
    print(summary(report, options.report))
    return int(code)


def no_gpu() -> str:
    """Why this Python sees no GPU; empty where it does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch

        if torch.cuda.is_available():
            return ""
    if torch.version.cuda is None:
        return (
            f"{sys.executable} has torch's CPU build, which sees no CUDA device; make gpu-check VENV=none takes the "
            "machine's own Python"
        )
    return "no CUDA device is here"


def summary(report: dict, path: str) -> str:
    lines = [
        f"{check['outcome']:<8}{check['seconds']:>7.1f} s  {check['name']}"
        + (f"  ({check['reason']})" if "reason" in check else "")
        for check in report["checks"]
    ]
    where = "on fake CUDA: no value and no time here is one of a GPU" if report["fake"] else report["machine"]["gpu"]
    counts = ", ".join(f"{report[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
    return "\n".join(["", *lines, f"{counts} in {report['seconds']:.0f} s, {where}; {path}"])


if __name__ == "__main__":
    sys.exit(main())
