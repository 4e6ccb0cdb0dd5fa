"""The command line: `flashrl COMMAND`; `flashrl --help` lists them."""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import signal
import sys
import warnings
from collections.abc import Sequence

from nemo_flashrl.commands.ablate import add_ablate
from nemo_flashrl.commands.convert import add_convert
from nemo_flashrl.commands.doctor import add_doctor
from nemo_flashrl.commands.plan import add_plan
from nemo_flashrl.commands.rehearse import add_rehearse
from nemo_flashrl.commands.report import add_report
from nemo_flashrl.commands.serve_rollout import add_serve_rollout
from nemo_flashrl.commands.train import add_train
from nemo_flashrl.launch.parent import tell_torchrun

_THAT_ONLY_PRINT = ("report", "doctor", "plan")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 failed, 2 refused with one line on stderr."""
    options = _parser().parse_args(arguments)
    atexit.register(gc.freeze)  # a process that ends need not look for garbage: seconds, with NeMo imported
    # torch 2.13 warns at import of a package that NVIDIA's own tools depend on; nobody here can act on it.
    warnings.formatwarning = _warning
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
        tell_torchrun(f"flashrl {options.command}: {error}")
        if os.environ.get("LOCAL_RANK", "0") == "0":  # once a node: every process refuses the same
            print(f"flashrl {options.command}: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if options.command != "rehearse":
            tell_torchrun(f"flashrl {options.command}: {type(error).__name__}: {error}")
            raise
        print(f"flashrl {options.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"flashrl {options.command}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        tell_torchrun(f"flashrl {options.command}: {type(error).__name__}: {error}")
        raise


def _warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Ours are for users, who need no place in our code."""
    if "nemo_flashrl" in filename:
        return f"warning: {message}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flashrl", description="Train long-horizon agents on NeMo and Megatron by FlashREINFORCE or GRPO."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    for add in (
        add_train,
        add_rehearse,
        add_serve_rollout,
        add_report,
        add_doctor,
        add_plan,
        add_convert,
        add_ablate,
    ):
        add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
