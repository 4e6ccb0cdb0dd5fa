"""Everything that can be refused before a model is built: plug-ins, prompts and settings of a configuration.

The model and its layout are looked at in model.py, tasks and prompts in environment.py. Reads small files
only, imports no NeMo. Each refusal is a ValueError of one line: field, value, remedy.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nemo_flashrl import algorithms, environments
from nemo_flashrl.algorithms.algorithm import Algorithm
from nemo_flashrl.algorithms.kl import WithKl
from nemo_flashrl.config import RunConfig, settings_of
from nemo_flashrl.engines.vllm import MAX_TEMPERATURE as VLLM_MAX_TEMPERATURE
from nemo_flashrl.environments.guard import in_words, raised_at
from nemo_flashrl.metrics.novelty import Novelty
from nemo_flashrl.plugins import load_function
from nemo_flashrl.preflight.environment import check_environment
from nemo_flashrl.preflight.model import (
    check_attention,
    check_optimizer,
    check_parallel,
    load_tokenizer,
    read_model,
    warn_of_noise,
    warn_of_text,
)
from nemo_flashrl.preflight.tensors import check_tensors
from nemo_flashrl.rollout.from_config import (
    held_out_classes,
    moving_group_size,
    novelty_of,
    prompt_source,
    temperature_schedule,
)
from nemo_flashrl.rollout.prompts import PromptSource
from nemo_flashrl.run.folder import RunFolder, open_folder
from nemo_flashrl.weight_sync.hf_reader import HfTensors


@dataclass
class Parts:
    """What a configuration names, loaded and checked."""

    algorithm: Algorithm
    environment: type
    environment_settings: Any
    tasks: Sequence[Any]
    tokenizer: Any
    vocab_size: int
    data_parallel: int
    folder: RunFolder | None = None  # None writes nothing and cannot be resumed
    hf_config: Mapping[str, Any] = field(default_factory=dict)  # the model's config.json
    prompts: PromptSource | None = None  # in which order the tasks come; on the first process
    novelty: Novelty | None = None  # measures which tokens are new, on the first process; None: n-grams do


def prepare(config: RunConfig, world_size: int) -> Parts:
    """Load and check what `config` names for a run of `world_size` processes."""
    if not config.output:
        raise ValueError("output='': name a folder for the run's files")
    if config.trainer.wandb_project:
        check_wandb(config.trainer.wandb_project)
    data_parallel = check_parallel(config, world_size)
    check_optimizer(config, here=True)
    check_attention(config)
    _check_servers(config)
    hf_config = read_model(config, world_size)
    warn_of_noise(config, hf_config)
    folder = open_folder(config, hf_config)
    tokenizer = load_tokenizer(config, hf_config["vocab_size"])
    check_tensors(HfTensors(config.model.path), hf_config)
    algorithm_class = _load(algorithms.load, config.algorithm.name, "algorithm.name")
    algorithm = algorithm_class(settings_of(algorithm_class, config.algorithm.settings, "algorithm"))
    if config.rollout.batch_size % algorithm.group_size:
        raise ValueError(
            f"rollout.batch_size={config.rollout.batch_size}: must be a multiple of the algorithm's "
            f"group_size ({algorithm.group_size})"
        )
    check_groups(config, algorithm.group_size)
    moving_group_size(config, algorithm.group_size)
    temperature_schedule(config)
    check_monitors(config, algorithm.group_size)
    algorithm = with_reference(config, algorithm)
    if config.rollout.summarizer:
        _load(load_function, config.rollout.summarizer, "rollout.summarizer")
    environment = _load(environments.load, config.environment.name, "environment.name")
    _check_evaluation(config)
    novelty, prompts, first = None, None, os.environ.get("RANK", "0") == "0"  # it alone samples
    if first:
        name = config.length_penalty.novelty
        novelty = _load(lambda _: novelty_of(config, tokenizer), name, "length_penalty.novelty")
    settings, tasks = check_environment(config, environment, tokenizer)
    warn_of_text(config, tokenizer)
    if config.evaluation.every_steps:
        held_out_classes(config, environment)
    if first:  # a curriculum reads the class of every task
        prompts = prompt_source(config, tasks)
    size = hf_config["vocab_size"]
    own = (folder, hf_config, prompts, novelty)
    return Parts(algorithm, environment, settings, tasks, tokenizer, size, data_parallel, *own)


def _check_evaluation(config: RunConfig) -> None:
    if config.evaluation.every_steps and config.reference.evaluate and config.rollout.mode != "sync":
        raise ValueError(
            f"rollout.mode={config.rollout.mode!r}: the sampler cannot serve the reference while episodes are in "
            "flight; set reference.evaluate=false, evaluation.every_steps=0 or rollout.mode=sync"
        )


def check_groups(config: RunConfig, group_size: int) -> None:
    """Refuse what needs groups where there are none, and the other way round."""
    name, rate = config.algorithm.name, config.value_head.learning_rate
    if rate > 0 and group_size > 1:
        raise ValueError(
            f"value_head.learning_rate={rate:g}: its prediction is the same for all rollouts of a group of {name} and "
            "cancels; set 0"
        )
    most = config.rollout.dynamic_sampling_max_groups
    if most and group_size == 1:
        raise ValueError(f"rollout.dynamic_sampling_max_groups={most}: {name} has no groups; set 0")


def with_reference(config: RunConfig, algorithm: Algorithm) -> Algorithm:
    """The algorithm with the KL that is configured; a KL without a reference is refused, and the other way round."""
    reference, kl = config.reference, config.kl
    if reference.mode == "none":
        if kl.coefficient > 0:
            raise ValueError(
                f"kl.coefficient={kl.coefficient:g} needs a reference policy and reference.mode=none: set it to "
                "frozen, hard or ema"
            )
        if algorithm.needs_reference:
            raise ValueError(
                f"algorithm.name={config.algorithm.name!r} needs a reference policy and reference.mode=none: set it to "
                "frozen, hard or ema"
            )
        return algorithm
    if kl.coefficient == 0 and not reference.evaluate and not algorithm.needs_reference:
        raise ValueError(
            f"reference.mode={reference.mode} with kl.coefficient=0 has no effect: set reference.mode=none, "
            "kl.coefficient above 0, or reference.evaluate=true"
        )
    if kl.coefficient > 0 and kl.place == "loss" and kl.estimator == "k1":
        warnings.warn(
            "kl.estimator=k1 in the loss has a gradient of mean zero, no pull to the reference: use k2 or k3, or "
            "kl.place=reward",
            stacklevel=2,
        )
    return WithKl(algorithm, kl.estimator, watch_entropy=kl.schedule == "entropy")


def check_monitors(config: RunConfig, group_size: int) -> None:
    """A limit on what the run does not measure would never be reached."""
    for name in ("unique_samples", "distinct_answers"):
        if getattr(config.monitors, name) is not None and group_size == 1:
            raise ValueError(f"monitors.{name}={getattr(config.monitors, name)}: the algorithm has no groups; set null")


def _load(loader: Callable[[str], Any], name: str, where: str) -> Any:
    try:
        return loader(name)
    except (ValueError, ImportError) as error:
        place = raised_at(error) if "." in name else ""
        raise ValueError(f"{where}={name!r}: {error} ({place})" if place else f"{where}={name!r}: {error}") from error
    except Exception as error:  # of the user's module as it is imported
        raise ValueError(f"{where}={name!r}: {in_words(error)}") from error


def _check_servers(config: RunConfig) -> None:
    """What can be said of the rollout engine without asking its servers."""
    rollout = config.rollout
    if rollout.weight_transfer != "file" and rollout.engine != "vllm":
        raise ValueError(
            f"rollout.weight_transfer={rollout.weight_transfer}: rollout.engine={rollout.engine} supports only file; "
            "set it to file, or rollout.engine to vllm"
        )
    if rollout.weight_transfer == "adapter" and not config.lora.rank:
        raise ValueError(
            "rollout.weight_transfer=adapter: lora.rank=0 trains no adapter; set a rank, or transfer by file"
        )
    if rollout.engine == "transformers":
        if rollout.servers:
            raise ValueError(
                f"rollout.servers={rollout.servers}: rollout.engine=transformers uses none; set it to vllm or sglang"
            )
        for name in ("workers", "worker_max_memory"):
            if (value := getattr(rollout, name)) is not None:
                raise ValueError(
                    f"rollout.{name}={value:g}: rollout.engine=transformers plays episodes in the trainer's process, "
                    "whose weights it shares; set null, or rollout.engine=vllm"
                )
        return
    if not rollout.servers:
        raise ValueError(f"rollout.servers=[]: rollout.engine={rollout.engine} needs the URL of at least one server")
    for url in rollout.servers:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ValueError(f"rollout.servers: {url!r} is not a URL like http://host:8000")
    if len({url.rstrip("/") for url in rollout.servers}) < len(rollout.servers):
        raise ValueError(f"rollout.servers={rollout.servers}: a server is named twice")
    schedule = temperature_schedule(config)
    highest = rollout.temperature if schedule is None else max(temperature for _, temperature in schedule.points)
    if rollout.engine == "vllm" and highest > VLLM_MAX_TEMPERATURE:
        raise ValueError(f"rollout.temperature={highest}: vLLM allows at most {VLLM_MAX_TEMPERATURE:g}")
    if rollout.weights_folder is not None and not Path(rollout.weights_folder).is_dir():
        raise ValueError(
            f"rollout.weights_folder={rollout.weights_folder!r}: no such folder; name one that every server sees"
        )


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
