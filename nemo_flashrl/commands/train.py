"""`flashrl train`: by a configuration, in the processes that torchrun or srun started."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from pathlib import Path


def add_train(commands: argparse._SubParsersAction) -> None:
    """Declare `flashrl train`."""
    train = commands.add_parser(
        "train",
        help="train from a configuration file; under torchrun for several processes",
        description="Train from a configuration. Under torchrun, the world size is tensor x pipeline x context x data.",
        epilog="example: torchrun --nproc-per-node 4 -m nemo_flashrl.cli train my_run.yaml parallel.tensor=2\n"
        "Rerun the same command to resume from the newest checkpoint.\n"
        "Exit code 0: the run is complete; 75: stopped by SIGTERM and saved, rerun to resume;\n"
        f"3: a limit under `monitors` stopped it, with a checkpoint.\n\n{_presets()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("config", metavar="CONFIG", help="a .yaml file, or the name of one under conf/experiment")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the file's settings")
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
    from nemo_flashrl.launch.slurm import adopt_tasks

    settings = config.load(options.config, options.overrides)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's workers outlive it where it is killed
        end_with_parent()
    adopt_tasks()
    for name, value in settings.cluster.environment.items():  # before torch is imported, which reads some of them
        os.environ.setdefault(name, value)
    if not Path(settings.model.path).is_dir():  # before what takes a minute to import on a busy machine
        raise ValueError(f"model.path={settings.model.path!r}: no such folder; give a Hugging Face checkpoint folder")
    from nemo_flashrl.run.folder import EXIT_MONITOR, EXIT_PREEMPTED, AlreadyComplete, NotSaved, Preempted, StoppedByMonitor
    from nemo_flashrl.engines.server_pool import NoServer
    from nemo_flashrl.train import train

    try:
        checkpoint = train(settings)
    except AlreadyComplete as complete:
        if os.environ.get("RANK", "0") == "0":
            print(f"flashrl train: {complete}")
        return 0
    except Preempted as stop:
        if os.environ.get("RANK", "0") == "0":
            print(f"flashrl train: {stop}; rerun the same command to resume", file=sys.stderr)
        return EXIT_PREEMPTED
    except StoppedByMonitor as stop:
        if os.environ.get("RANK", "0") == "0":
            print(f"flashrl train: {stop}", file=sys.stderr)
        return EXIT_MONITOR
    except (NoServer, NotSaved) as error:
        print(f"flashrl train: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = f"free space for output={settings.output!r} and temporary files, then rerun the same command to resume"
        print(f"flashrl train: no space left on device ({error}): {free}", file=sys.stderr)
        return 1
    if os.environ.get("RANK", "0") == "0":
        print(f"checkpoint written to {checkpoint}")
    return 0
