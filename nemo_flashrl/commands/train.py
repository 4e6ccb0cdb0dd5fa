"""`flashrl train`: by a configuration, in the processes that torchrun or srun started."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_flashrl.config import RunConfig


def add_train(commands: argparse._SubParsersAction) -> None:
    """Declare `flashrl train`."""
    train = commands.add_parser(
        "train",
        help="train from a configuration file; under torchrun for several processes",
        description="Train from a configuration. Under torchrun, the world size is tensor x pipeline x context x data.",
        epilog="example: torchrun --nproc-per-node 4 -m nemo_flashrl.cli train my_run.yaml parallel.tensor=2\n"
        "Rerun the same command to resume from the newest checkpoint.\n"
        "Exit code 0: the run is complete; 75: stopped by SIGTERM and saved, rerun to resume; 130: by Ctrl-C;\n"
        f"3: a limit under `monitors` stopped it, with a checkpoint.\n\n{_presets()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("config", metavar="CONFIG", help="a .yaml file, or the name of one under conf/experiment")
    train.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="overrides of the file's settings")
    train.set_defaults(run=_train)


def _presets() -> str:
    """Recipes and budgets, each with the first sentence of its file."""
    lines = []
    for group in ("recipe", "budget"):
        lines.append(f"{group}=NAME, one of:")
        for file in sorted((Path(__file__).parents[1] / "conf" / group).glob("*.yaml")):
            comment = [line[2:] for line in file.read_text().splitlines() if line.startswith("# ")][1]
            lines.append(f"  {file.stem:<14} {comment.partition('. ')[0].rstrip('.:')}")
    return "\n".join([*lines, "docs/recipes.md and docs/ablations.md tell them apart."])


def _train(options: argparse.Namespace) -> int:
    from nemo_flashrl import config
    from nemo_flashrl.launch.parent import end_with_parent
    from nemo_flashrl.launch.processes import adopt_tasks
    from nemo_flashrl.weight_sync.hf_config import check_folder

    settings = config.load(options.config, options.overrides)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's workers outlive it where it is killed
        end_with_parent()
    adopt_tasks()
    for name, value in settings.cluster.environment.items():  # before torch is imported, which reads some of them
        os.environ.setdefault(name, value)
    check_folder(settings.model.path)  # before what takes a minute to import on a busy machine
    from nemo_flashrl.doctor.rules_machine import DEVICE_MEMORY
    from nemo_flashrl.engines.server_pool import NoServer
    from nemo_flashrl.run.folder import (
        EXIT_MONITOR,
        EXIT_PREEMPTED,
        AlreadyComplete,
        Interrupted,
        NotSaved,
        Preempted,
        StoppedByMonitor,
    )
    from nemo_flashrl.train import train

    try:
        checkpoint = train(settings)
    except AlreadyComplete as complete:
        if os.environ.get("RANK", "0") == "0":
            print(f"flashrl train: {complete}")
        return 0
    except (Preempted, Interrupted) as stop:
        code = EXIT_PREEMPTED if isinstance(stop, Preempted) else 128 + signal.SIGINT
        return _stopped(f"{stop}; rerun the same command to resume", code)
    except StoppedByMonitor as stop:
        return _stopped(str(stop), EXIT_MONITOR)
    except (NoServer, NotSaved) as error:
        return _stopped(str(error), 1, every_rank=True)
    except RuntimeError as error:
        said = f"{type(error).__name__}: {error}"
        if not DEVICE_MEMORY.search(said):
            raise
        return _out_of_memory(settings, " ".join(said.split()))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = f"free space for output={settings.output!r} and temporary files, then rerun the same command to resume"
        return _stopped(f"no space left on device ({error}): {free}", 1, every_rank=True)
    if os.environ.get("RANK", "0") == "0":
        print(f"checkpoint written to {checkpoint}")
    return 0


def _out_of_memory(config: RunConfig, said: str) -> int:
    from nemo_flashrl.metrics.progress import LOGS
    from nemo_flashrl.plan.page import what_would_have_fitted

    advice = what_would_have_fitted(config, int(os.environ.get("WORLD_SIZE", "1")), said)
    logs = f"the traceback is in {Path(config.output) / LOGS}"
    return _stopped("; ".join(filter(None, (f"out of memory on a GPU ({said})", logs, advice))), 1, every_rank=True)


def _stopped(reason: str, code: int, *, every_rank: bool = False) -> int:
    from nemo_flashrl.launch.parent import tell_torchrun

    tell_torchrun(f"flashrl train: {reason}")
    if every_rank or os.environ.get("RANK", "0") == "0":
        print(f"flashrl train: {reason}", file=sys.stderr)
    return code
