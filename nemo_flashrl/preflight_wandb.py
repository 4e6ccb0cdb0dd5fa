"""Whether Weights & Biases would take a run, asked before a model is built; by itself it tells minutes later."""

from __future__ import annotations

import importlib.util
import inspect
import os


def check_wandb(project: str) -> None:
    """Refuse a project without the package, or online without a login; on the first process, which alone logs.

    Raises:
        ValueError: one line: field, value, remedy.
    """
    where = f"trainer.wandb_project={project!r}"
    if importlib.util.find_spec("wandb") is None:
        raise ValueError(f"{where}: the wandb package is not installed; install it or leave the project empty")
    if os.environ.get("RANK", "0") != "0":
        return
    import wandb

    try:
        settings = wandb.setup().settings
        if settings.mode not in ("online", "shared") or "prompt" not in inspect.signature(wandb.login).parameters:
            return  # nothing is sent, or a version that cannot be asked without a prompt
        known = wandb.login(prompt=False, verify=False)
    except (ValueError, wandb.errors.AuthenticationError) as error:  # a value of WANDB_... that it does not take
        raise ValueError(f"{where}: wandb says: {' '.join(str(error).split())}") from error
    if not known:
        raise ValueError(
            f"{where}: no login for {settings.base_url}; run `wandb login`, set WANDB_API_KEY, or WANDB_MODE=offline"
        )
