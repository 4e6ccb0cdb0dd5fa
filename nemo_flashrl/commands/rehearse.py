"""`flashrl rehearse`: the whole path, small and real, on a CPU."""

from __future__ import annotations

import argparse

from nemo_flashrl.commands import at_least, path


def add_rehearse(commands: argparse._SubParsersAction) -> None:
    """Declare `flashrl rehearse`."""
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
        "--output", type=path, default=None, metavar="DIR", help="must not exist (default runs/rehearsal-<time>)"
    )
    rehearse.add_argument("overrides", nargs="*", metavar="key=value", help="overrides, as for `flashrl train`")
    rehearse.set_defaults(run=_rehearse)


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
