"""The command line: `flashrl COMMAND`; `flashrl --help` lists them."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from nemo_flashrl.ablation.command import add_ablate
from nemo_flashrl.arguments import at_least
from nemo_flashrl.diagnostics.commands import add_doctor, add_report
from nemo_flashrl.launch.plan_command import add_plan
from nemo_flashrl.rollout_server.command import add_serve_rollout
from nemo_flashrl.weights.command import add_convert

_THAT_ONLY_PRINT = ("report", "doctor", "plan")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 failed, 2 refused with one line on stderr."""
    options = _parser().parse_args(arguments)
    # torch 2.13 warns at import of a package that NVIDIA's own tools depend on; nobody here can act on it.
    warnings.filterwarnings("ignore", message="The pynvml package is deprecated", category=FutureWarning)
    try:
        code = options.run(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # of a reader that has seen enough, `head` say, where the command has no other pipe
        if options.command not in _THAT_ONLY_PRINT:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at the end
        return 128 + signal.SIGPIPE
    except ValueError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # once a node: every process refuses the same
            print(f"flashrl {options.command}: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if options.command != "rehearse":
            raise
        print(f"flashrl {options.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"flashrl {options.command}: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flashrl", description="Train long-horizon agents on NeMo and Megatron by FlashREINFORCE or GRPO."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="train from a configuration file; under torchrun for several processes",
        description="Train from a configuration. Under torchrun, the world size is tensor x pipeline x context x data.",
        epilog="example: torchrun --nproc-per-node 4 -m nemo_flashrl.cli train my_run.yaml parallel.tensor=2\n"
        "Rerun the same command to resume from the newest checkpoint.\n"
        "Exit code 0: the run is complete; 75: stopped by SIGTERM and saved, rerun to resume;\n"
        "3: a limit under `monitors` stopped it, with a checkpoint.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("config", metavar="CONFIG", help="a .yaml file, or the name of one under conf/experiment")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the file's settings")
    train.set_defaults(run=_train)

    rehearse = commands.add_parser(
        "rehearse",
        help="run the whole training path end to end, small, on this machine's CPU",
        description="Learn a multi-turn tool-calling task with the real NeMo trainer and a real Megatron model.",
    )
    rehearse.add_argument(
        "--experiment",
        metavar="NAME",
        help="rehearse this experiment, shrunk to this machine; its parallel sizes replace those below",
    )
    rehearse.add_argument("--tp", type=at_least(1), default=1, metavar="N", help="tensor-parallel size (default 1)")
    rehearse.add_argument("--pp", type=at_least(1), default=1, metavar="N", help="pipeline-parallel size (default 1)")
    rehearse.add_argument("--cp", type=at_least(1), default=1, metavar="N", help="context-parallel size (default 1)")
    rehearse.add_argument("--dp", type=at_least(1), default=1, metavar="N", help="data-parallel size (default 1)")
    rehearse.add_argument("--algorithm", default="flash_reinforce", metavar="NAME", help="flash_reinforce | grpo")
    rehearse.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the warm start, the tasks and the run"
    )
    rehearse.add_argument(
        "--output", type=Path, default=None, metavar="DIR", help="must not exist (default runs/rehearsal-<time>)"
    )
    rehearse.add_argument("overrides", nargs="*", metavar="key=value", help="overrides, as for `flashrl train`")
    rehearse.set_defaults(run=_rehearse)
    add_serve_rollout(commands)
    add_report(commands)
    add_doctor(commands)
    add_plan(commands)
    add_convert(commands)
    add_ablate(commands)
    return parser


def _train(options: argparse.Namespace) -> int:
    from nemo_flashrl import config
    from nemo_flashrl.launch.slurm import adopt_tasks

    settings = config.load(options.config, options.overrides)
    adopt_tasks()
    for name, value in settings.cluster.environment.items():  # before torch is imported, which reads some of them
        os.environ.setdefault(name, value)
    if not Path(settings.model.path).is_dir():  # before what takes a minute to import on a busy machine
        raise ValueError(f"model.path={settings.model.path!r}: no such folder; give a Hugging Face checkpoint folder")
    from nemo_flashrl.resume import EXIT_MONITOR, EXIT_PREEMPTED, AlreadyComplete, NotSaved, Preempted, StoppedByMonitor
    from nemo_flashrl.rollout.server_pool import NoServer
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


def _rehearse(options: argparse.Namespace) -> int:
    from nemo_flashrl.rehearsal.run import Rehearsal, default_output, rehearse

    if options.experiment:
        from nemo_flashrl.rehearsal.experiment import rehearse_experiment

        output = options.output or default_output()
        proved = rehearse_experiment(options.experiment, output, tuple(options.overrides), options.seed)
        print(proved.text())
        return 0 if proved.passed else 1
    summary = rehearse(
        Rehearsal(
            output=options.output or default_output(),
            tensor=options.tp,
            pipeline=options.pp,
            context=options.cp,
            data=options.dp,
            algorithm=options.algorithm,
            seed=options.seed,
            overrides=tuple(options.overrides),
        )
    )
    print(summary.text())
    return 0 if summary.passed else 1


if __name__ == "__main__":
    sys.exit(main())
