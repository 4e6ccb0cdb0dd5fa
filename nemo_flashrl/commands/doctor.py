"""`flashrl doctor`: of a run, before one, or of a node."""

from __future__ import annotations

import argparse

from nemo_flashrl.commands import at_least, path

LOOKS = ("rewards", "groups")  # what `flashrl doctor` looks at before a run
REWARD_SAMPLES = 1000


def add_doctor(commands: argparse._SubParsersAction) -> None:
    """Declare `flashrl doctor`."""
    doctor = commands.add_parser(
        "doctor",
        help="diagnose a run, or check before one: evidence, likely causes, the setting to change",
        description="Diagnose a run from its metrics: evidence, likely causes, the setting to change. "
        "Or check before a run: `rewards CONFIG` the reward terms over a set of samples (distribution, outliers, "
        "correlation with length), `groups CONFIG` the diversity and rewards of the rollouts of each prompt, "
        "`env [CONFIG]` this node. "
        "Exit code 0: nothing found; 1: findings.",
        epilog="examples: flashrl doctor runs/first\n"
        "          flashrl doctor rewards my_run.yaml model.path=warm_start --from-run runs/first\n"
        "          flashrl doctor groups my_run.yaml rollout.temperature=0.9 --samples 8 --show 20",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="folder of a run, in progress or ended; or `rewards`, `groups` or `env`, CONFIG and key=value settings",
    )
    doctor.add_argument(
        "--from-run", type=path, default=None, metavar="RUN", help="rewards: use the newest samples of this run"
    )
    doctor.add_argument("--prompts", type=int, default=20, metavar="N", help="groups: number of prompts (default 20)")
    doctor.add_argument(
        "--samples",
        type=int,
        default=None,
        metavar="N",
        help=f"rewards: number of samples (default {REWARD_SAMPLES}); groups: samples per prompt (default: group size)",
    )
    doctor.add_argument(
        "--show", type=at_least(0), default=0, metavar="N", help="groups: print the texts of the first N rollouts"
    )
    doctor.set_defaults(run=_doctor)


def _look(options: argparse.Namespace) -> int:
    from nemo_flashrl.doctor.before_run import look_at_groups, look_at_rewards

    kind, *rest = options.runs
    if not rest:
        raise ValueError(f"doctor {kind}: name a configuration (for a folder of that name, write ./{kind})")
    for name in ("prompts", "samples"):
        value = getattr(options, name)
        if value is not None and value < (2 if kind == "groups" and name == "samples" else 1):
            raise ValueError(f"--{name}={value}: too few")
    config, overrides = rest[0], rest[1:]
    if kind == "rewards":
        samples = options.samples or REWARD_SAMPLES
        text, found = look_at_rewards(config, overrides, samples=samples, run=options.from_run)
    else:
        numbers = {"prompts": options.prompts, "samples": options.samples, "show": options.show}
        text, found = look_at_groups(config, overrides, **numbers)
    print(text)
    return 1 if found else 0


def _doctor(options: argparse.Namespace) -> int:
    from nemo_flashrl.doctor.examine import as_text, examine
    from nemo_flashrl.run.record import read_run

    if options.runs[0] == "env":
        from nemo_flashrl.doctor.node import check_node

        text, bad = check_node(next(iter(options.runs[1:]), None), options.runs[2:])
        print(text)
        return 1 if bad else 0
    if options.runs[0] in LOOKS:
        return _look(options)
    found = False
    for folder in map(path, options.runs):
        run = read_run(folder, may_be_empty=True)
        findings = examine(run)
        print(as_text(run, findings))
        found = found or bool(findings)
    return 1 if found else 0
