"""Calls of the conversion functions in one process, one after the other; what each answers or refuses."""

from __future__ import annotations

import json
import multiprocessing
import resource
from pathlib import Path
from typing import Any

import torch

from nemo_flashrl import platform
from nemo_flashrl.cli import main as flashrl
from nemo_flashrl.config import load
from nemo_flashrl.convert import compare, convert
from nemo_flashrl.preflight.model import read_model


def main(out: Path, *calls: tuple, file_bytes: int | None = None) -> None:
    """Each call is (name, *arguments). `file_bytes` bounds every file that is written, as a full disk does."""
    if file_bytes is not None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, before[1]))
    # Each in a process of its own: a call's process groups keep threads for as long as its models are in cycles.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        answers = [pool.apply(answer, call) for call in calls]
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    out.write_text(json.dumps(answers))


def answer(name: str, *arguments: Any) -> Any:
    functions = {
        "differences": compare.differences,
        "load_with_nemo": load_with_nemo,
        "refuse_training": refuse_training,
        "flashrl": lambda *command: flashrl(list(command)),
    }
    function = functions.get(name) or getattr(convert, name)
    try:
        result = function(*arguments)
    except ValueError as error:
        return f"refused: {error}"
    return str(result) if isinstance(result, Path) else result


def refuse_training(folder: Path) -> None:
    """From a folder that is no Hugging Face checkpoint: ValueError."""
    read_model(load("rehearsal", [f"output={folder}-run", f"model.path='{folder}'"]), 1)


def load_with_nemo(folder: Path) -> dict[str, Any]:
    """What NeMo's own loader makes of a folder, on the layers that this machine has: classes, sum of all weights."""
    import nemo.lightning as nl
    from megatron.core import parallel_state
    from nemo.lightning.io.api import load_context

    from nemo_flashrl.models.families import for_this_platform

    model = load_context(folder, subpath="model")
    fused = model.config.apply_rope_fusion
    for_this_platform(model.config)
    trainer = nl.Trainer(
        devices=1,
        accelerator=platform.accelerator(),
        strategy=nl.MegatronStrategy(ddp="pytorch", setup_optimizers=False, process_group_backend=platform.backend()),
    )
    trainer.strategy.connect(model)
    trainer.strategy.setup_environment()
    model.configure_model()
    trainer.strategy.setup(trainer)
    trainer.strategy.load_checkpoint(folder)
    answer = {
        "model": type(model).__name__,
        "config": type(model.config).__name__,
        "tokenizer": type(model.tokenizer).__name__,
        "fused": fused,
        "sum": sum(float(p.detach().double().sum()) for p in model.parameters()),
    }
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    return answer
