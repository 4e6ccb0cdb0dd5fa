"""What is refused for want of room: memory, before a job waits in a queue; disk, before a run's first step."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_flashrl.config import RunConfig
from nemo_flashrl.plan.devices import find_device
from nemo_flashrl.plan.fitting import check_layout, fits, largest_context
from nemo_flashrl.plan.page import DEFAULTS, disk_line, layout_of, run_disk, size, sizes_of
from nemo_flashrl.preflight.model import check_optimizer, check_parallel
from nemo_flashrl.weights.model_shape import FAMILIES, model_shape


def admit(config: RunConfig) -> None:
    """Refuse sizes that the cluster could not run, or whose memory `flashrl plan` finds too much.

    Without `model.hf_config` nothing is said of the model: its files may be the cluster's alone.

    Raises:
        ValueError: one line: field, value, remedy.
    """
    gpus = config.cluster.nodes * config.cluster.gpus_per_node
    if not gpus:
        return
    replicas = check_parallel(config, gpus)
    check_optimizer(config, here=False)
    if config.rollout.batch_size < replicas:
        raise ValueError(
            f"rollout.batch_size={config.rollout.batch_size}: leaves some of the {replicas} data-parallel replicas of "
            f"{gpus} GPUs without a trajectory; set {replicas} at least, or fewer GPUs"
        )
    if not (config.model.hf_config and config.cluster.device):
        return
    shape, device = model_shape(config.model.hf_config), find_device(config.cluster.device)
    layout, tokens = layout_of(DEFAULTS | sizes_of(config))
    check_layout(shape, layout)
    if not fits(shape, layout, device, tokens):
        longest = largest_context(shape, layout, device)
        field = "batching.max_tokens_per_microbatch"
        if tokens == config.model.context_length:
            field = "model.context_length"
        raise ValueError(
            f"{field}={tokens}: does not fit a {config.cluster.device} at parallel.tensor={layout.tensor}, "
            f"parallel.pipeline={layout.pipeline}, model.recompute={layout.recompute}; {longest} tokens do: set fewer, "
            "or see `flashrl plan` for other sizes"
        )


def report_disk(config: RunConfig, hf_config: Mapping[str, Any]) -> None:
    """Say on stderr what the run will write; what the folder holds of it already counts as room.

    Nothing is said of a family of models whose parameters the plan cannot count.

    Raises:
        ValueError: one line: it does not fit.
    """
    if hf_config.get("model_type") not in FAMILIES:
        return
    sizes = DEFAULTS | sizes_of(config) | {"gpus": 0}  # data parallelism changes no checkpoint
    disk = run_disk(model_shape(hf_config), layout_of(sizes)[0], sizes)
    output = Path(config.output).absolute()
    held = sum(file.stat().st_size for file in output.glob("checkpoints/**/*") if file.is_file())
    free = shutil.disk_usage(next(folder for folder in (output, *output.parents) if folder.is_dir())).free
    if disk.total > held + free:
        raise ValueError(
            f"output={config.output!r}: {disk_line(disk)}, and {size(free)} are free there: free some, lower "
            f"checkpoint.keep ({config.checkpoint.keep}), or choose another folder"
        )
    print(f"{disk_line(disk)}; {size(free)} free for output={config.output!r}", file=sys.stderr)
