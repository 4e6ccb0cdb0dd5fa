"""`flashrl convert`: convert checkpoints between Hugging Face, NeMo and a run's own."""

from __future__ import annotations

import argparse

from nemo_flashrl.commands import path


def add_convert(commands: argparse._SubParsersAction) -> None:
    """Add the command and its four actions to the parser of `flashrl`."""
    convert = commands.add_parser(
        "convert",
        help="convert checkpoints between Hugging Face, NeMo and a run's own",
        description="Convert a whole checkpoint; weights travel bit for bit, the source is only read, and the target "
        "appears whole or not at all.",
    )
    actions = convert.add_subparsers(dest="action", required=True, metavar="ACTION")

    action = _action(actions, "hf-to-nemo", "Hugging Face folder -> NeMo checkpoint folder", _hf_to_nemo)
    action.add_argument("source", type=path, metavar="SRC", help="folder with config.json and .safetensors files")
    action.add_argument("target", type=path, metavar="DST", help="must not exist")

    action = _action(actions, "nemo-to-hf", "NeMo checkpoint folder -> Hugging Face folder", _nemo_to_hf)
    action.add_argument("source", type=path, metavar="SRC", help="folder with context/ and weights/")
    action.add_argument("target", type=path, metavar="DST", help="must not exist")
    action.add_argument(
        "--reference",
        type=path,
        metavar="HF_DIR",
        help="folder whose configuration and tokenizer the export gets (default: those that the checkpoint carries)",
    )

    action = _action(actions, "run-to-hf", "newest checkpoint of a run -> Hugging Face folder", _run_to_hf)
    action.add_argument("source", type=path, metavar="RUN", help="output folder of `flashrl train`")
    action.add_argument("target", type=path, metavar="DST", help="must not exist")
    which = action.add_mutually_exclusive_group()
    which.add_argument("--policy", action="store_true", help="the policy, adapters merged in (default)")
    which.add_argument("--reference-ema", action="store_true", help="the reference policy instead of the policy")
    which.add_argument("--adapter", action="store_true", help="the LoRA adapter alone, in PEFT's format")

    action = _action(actions, "check", "compare two checkpoints: configuration, tensors, logits", _check)
    action.add_argument("first", type=path, metavar="A", help="Hugging Face or NeMo folder")
    action.add_argument("second", type=path, metavar="B", help="Hugging Face or NeMo folder")


def _action(actions: argparse._SubParsersAction, name: str, text: str, run) -> argparse.ArgumentParser:
    action = actions.add_parser(name, help=text, description=text)
    action.set_defaults(run=run)
    return action


def _prepare() -> None:
    from nemo_flashrl import platform

    with platform.importing():
        platform.install()
        import nemo_flashrl.convert.convert  # noqa: F401  with all of NeMo that it needs


def _hf_to_nemo(options: argparse.Namespace) -> int:
    _prepare()
    from nemo_flashrl.convert.convert import hf_to_nemo

    print(f"NeMo checkpoint written to {hf_to_nemo(options.source, options.target)}")
    return 0


def _nemo_to_hf(options: argparse.Namespace) -> int:
    _prepare()
    from nemo_flashrl.convert.convert import nemo_to_hf

    print(f"Hugging Face folder written to {nemo_to_hf(options.source, options.target, options.reference)}")
    return 0


def _run_to_hf(options: argparse.Namespace) -> int:
    _prepare()
    from nemo_flashrl.convert.convert import run_to_hf

    which = "reference" if options.reference_ema else "adapter" if options.adapter else "policy"
    print(f"Hugging Face folder written to {run_to_hf(options.source, options.target, which)}")
    return 0


def _check(options: argparse.Namespace) -> int:
    _prepare()
    from nemo_flashrl.convert.compare import differences

    found = differences(options.first, options.second)
    print("\n".join(found) or "equal: configuration and tensors bit for bit, logits within 1e-5 of the largest")
    return 1 if found else 0
