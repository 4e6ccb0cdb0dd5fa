"""`flashrl plan`: its arguments."""

from __future__ import annotations

import argparse
import os

from nemo_flashrl.commands import at_least
from nemo_flashrl.plan.devices import DEVICES


def add_plan(commands: argparse._SubParsersAction) -> None:
    """Declare `flashrl plan`."""
    plan = commands.add_parser(
        "plan",
        help="estimate memory and step time of a job before it starts",
        description="Estimate memory per pipeline stage, the largest context, the fewest GPUs and the step time "
        "from a model's config.json and the sizes of a job. No weights are loaded.",
        epilog="example: flashrl plan /models/llama-8b --device H800 --gpus 16 --tp 4 --context 32768 --recompute full",
    )
    what = "Hugging Face folder, its config.json, or a configuration's .yaml"
    plan.add_argument("model", type=os.path.expanduser, metavar="MODEL", help=what)
    plan.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="overrides of a configuration")
    plan.add_argument("--device", default=None, metavar="NAME", help=f"{' | '.join(DEVICES)} (default H800)")
    plan.add_argument(
        "--gpus", type=at_least(1), default=None, metavar="N", help="GPUs of the trainer (default: TP x PP x CP)"
    )
    for name, what in (("tp", "tensor"), ("pp", "pipeline"), ("cp", "context"), ("ep", "expert")):
        plan.add_argument(
            f"--{name}", type=at_least(1), default=None, metavar="N", help=f"{what}-parallel size (default 1)"
        )
    plan.add_argument(
        "--lora-rank", type=at_least(0), default=None, metavar="N", help="LoRA rank; 0: full fine-tuning (default)"
    )
    plan.add_argument(
        "--context", type=at_least(1), default=None, metavar="N", help="context length in tokens (default 32768)"
    )
    plan.add_argument(
        "--microbatch",
        type=at_least(1),
        default=None,
        metavar="N",
        help="token budget of a microbatch (default: the context)",
    )
    plan.add_argument(
        "--batch", type=at_least(1), default=None, metavar="N", help="batch size: trajectories per step (default 64)"
    )
    plan.add_argument("--recompute", choices=["none", "selective", "full"], default=None)
    plan.add_argument("--precision", choices=["bf16", "fp32"], default=None)
    plan.add_argument("--reference", choices=["none", "frozen", "hard", "ema"], default=None)
    plan.add_argument(
        "--plain-optimizer",
        action="store_true",
        help="no distributed optimizer: optimizer state replicated on every rank",
    )
    for name, what in (("moments", "Adam's moments"), ("gradients", "gradients")):
        plan.add_argument(f"--{name}-dtype", choices=["fp32", "bf16"], default=None, help=f"of {what} (default fp32)")
    what = "share of the optimizer that the host holds (default 0)"
    plan.add_argument("--offload-fraction", type=float, default=None, metavar="X", help=what)
    plan.add_argument(
        "--head-chunk",
        type=at_least(1),
        default=None,
        metavar="N",
        help="tokens whose logits are materialised at a time (default: picked by device and shape)",
    )
    plan.add_argument(
        "--action-share", type=float, default=0.4, metavar="X", help="share of action tokens (default 0.4)"
    )
    plan.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    from nemo_flashrl.plan.page import plan

    return plan(options)
