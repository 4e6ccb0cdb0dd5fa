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
        help="train by a configuration file; start it under torchrun for several processes",
        description="Train by a configuration. Under torchrun, the world size is tensor x pipeline x context x data.",
        epilog="example: torchrun --nproc-per-node 4 -m nemo_flashrl.cli train my_run.yaml parallel.tensor=2\n"
        "The same command with the same output goes on from the run's newest checkpoint; exit code 75 asks for that.\n"
        "Exit code 3: a limit under `monitors` has ended the run, with a checkpoint.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("config", metavar="CONFIG", help="a .yaml file, or the name of one under conf/experiment")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the file's")
    train.set_defaults(run=_train)


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
    from nemo_flashrl.engines.server_pool import NoServer
    from nemo_flashrl.run.folder import EXIT_MONITOR, EXIT_PREEMPTED, NotSaved, Preempted, StoppedByMonitor
    from nemo_flashrl.train import train

    try:
        checkpoint = train(settings)
    except Preempted as stop:
        if os.environ.get("RANK", "0") == "0":
            print(f"flashrl train: {stop}; the same command goes on from there", file=sys.stderr)
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
        free = f"free some where output={settings.output!r} and temporary files go, and start the same command again"
        print(f"flashrl train: no space is left ({error}): {free}", file=sys.stderr)
        return 1
    if os.environ.get("RANK", "0") == "0":
        print(f"checkpoint written to {checkpoint}")
    return 0
