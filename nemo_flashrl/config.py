"""The typed configuration of a run, and the only reader of YAML.

A configuration file is composed by Hydra: a `defaults` list may name files under `conf/`, and `key=value` overrides
come last. Plug-ins (algorithm, environment) declare their settings beside their class; here they are a plain mapping.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException


@dataclass
class ModelConfig:
    """What is trained."""

    path: str = MISSING  # Hugging Face checkpoint folder to start from
    context_length: int = 4096  # tokens of one trajectory at most, prompt included
    vocab_divisible_by: int = 128  # the embedding is padded to a multiple of this times the tensor-parallel size
    head_chunk_tokens: int = 512  # tokens whose logits are alive at a time
    head_logits_budget_mib: int = 64  # a microbatch whose logits fit is scored and trained in one pass
    recompute: str = "none"  # "none" | "selective": attention | "full": every layer, in the backward pass
    precision: str = "bf16"  # "bf16" | "fp32"


@dataclass
class ParallelConfig:
    """How the model is spread; data parallelism takes what the world size leaves."""

    tensor: int = 1
    pipeline: int = 1
    sequence: bool = False  # sequence parallelism over the tensor-parallel group


@dataclass
class OptimizerConfig:
    """AdamW with linear warm-up, then constant."""

    learning_rate: float = 1e-6
    warmup_steps: int = 4
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    clip_gradient: float = 1.0


@dataclass
class PluginConfig:
    """A plug-in by bare name or dotted path, and the settings that its class declares."""

    name: str = MISSING
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class RolloutConfig:
    """How trajectories are made."""

    batch_size: int = 64  # trajectories of one optimizer step (B)
    max_in_flight: int = 0  # episodes running at a time; 0 means batch_size
    lag: int = 0  # batches collected ahead of the one in training; 0 is on-policy
    max_staleness: int | None = None  # policy versions between sampling and training; older is dropped
    temperature: float = 1.0
    max_turns: int = 8
    max_tokens_per_turn: int = 512
    max_observation_tokens: int = 2048
    stop: list[str] = field(default_factory=list)  # tokens that end an action, beside the end-of-sequence token
    step_timeout: float = 60.0  # seconds an environment may take to answer


@dataclass
class BatchingConfig:
    """How a batch is split into microbatches."""

    max_tokens_per_microbatch: int = 16384  # a longer trajectory goes alone
    layout: str = "packed"  # "packed": one row, attention inside each trajectory | "padded": a row each
    context_margin: float = 0.0
    on_too_long: str = "error"  # what exceeds the context: "error" | "truncate" | "drop"


@dataclass
class TrainerConfig:
    """How long, and from which randomness."""

    steps: int = 100
    seed: int = 0
    log_trajectories: int = 4  # full trajectories written as text each step


@dataclass
class RunConfig:
    """One run."""

    output: str = MISSING  # folder of everything the run leaves; must not exist
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    algorithm: PluginConfig = field(default_factory=lambda: PluginConfig("flash_reinforce"))
    environment: PluginConfig = field(default_factory=PluginConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)


TINY = 1e-12  # stands for "above 0"
CHOICES = {
    "model.precision": ("bf16", "fp32"),
    "model.recompute": ("none", "selective", "full"),
    "batching.layout": ("packed", "padded"),
    "batching.on_too_long": ("error", "truncate", "drop"),
}
RANGES = {
    "model.context_length": (2, math.inf),
    "model.vocab_divisible_by": (1, math.inf),
    "model.head_chunk_tokens": (1, math.inf),
    "model.head_logits_budget_mib": (0, math.inf),
    "parallel.tensor": (1, math.inf),
    "parallel.pipeline": (1, math.inf),
    "optimizer.learning_rate": (TINY, 1),
    "optimizer.warmup_steps": (0, math.inf),
    "optimizer.beta1": (0, 1),
    "optimizer.beta2": (0, 1),
    "optimizer.weight_decay": (0, math.inf),
    "optimizer.clip_gradient": (TINY, math.inf),
    "rollout.batch_size": (1, math.inf),
    "rollout.max_in_flight": (0, math.inf),
    "rollout.lag": (0, math.inf),
    "rollout.max_staleness": (0, math.inf),
    "rollout.temperature": (TINY, 100),
    "rollout.max_turns": (1, math.inf),
    "rollout.max_tokens_per_turn": (1, math.inf),
    "rollout.max_observation_tokens": (1, math.inf),
    "rollout.step_timeout": (TINY, math.inf),
    "batching.max_tokens_per_microbatch": (1, math.inf),
    "batching.context_margin": (0, 0.99),
    "trainer.steps": (1, math.inf),
    "trainer.seed": (0, 2**31),
    "trainer.log_trajectories": (0, math.inf),
}


def conf_folder() -> Path:
    """The shipped configuration files: `conf/` of a checkout, package data of an installed wheel."""
    return Path(__file__).parent / "conf"


def load(name_or_path: str, overrides: list[str] | None = None) -> RunConfig:
    """Read and check a configuration.

    Args:
        name_or_path: a YAML file, or the name of one under `conf/experiment`.
        overrides: `key=value` in Hydra's grammar.

    Raises:
        ValueError: one line with field, value and remedy.
    """
    path = Path(name_or_path)
    if path.suffix not in {".yaml", ".yml"}:
        path = conf_folder() / "experiment" / f"{name_or_path}.yaml"
    if not path.is_file():
        shipped = ", ".join(sorted(p.stem for p in (conf_folder() / "experiment").glob("*.yaml")))
        raise ValueError(f"configuration {name_or_path!r} is neither a .yaml file nor one of: {shipped}")
    try:
        with initialize_config_dir(str(path.parent.resolve()), version_base="1.3"):
            search = f"hydra.searchpath=[file://{conf_folder().resolve()}]"
            raw = compose(path.stem, overrides=[search, *map(_hydra_override, overrides or [])])
        merged = OmegaConf.merge(OmegaConf.structured(RunConfig), raw)
        config = OmegaConf.to_object(merged)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_one_line(error, path)) from error
    check(config)
    return config


def _hydra_override(override: str) -> str:
    """A field that the file leaves at its default may be set too; the typed merge refuses what is no field."""
    key, separator, _ = override.partition("=")
    if not separator or not key:
        raise ValueError(f"override {override!r} is not of the form key=value")
    is_group = (conf_folder() / key).is_dir()
    return override if is_group or not key[0].isalpha() else f"++{override}"


def _one_line(error: Exception, path: Path) -> str:
    cause = error.__cause__ or error
    key = getattr(cause, "full_key", None) or getattr(error, "full_key", None)
    if type(cause).__name__ in {"ConfigKeyError", "ConfigAttributeError"} and key:
        return f"{path}: unknown key {key!r}; known here: {', '.join(_known_keys(key))}"
    if isinstance(cause, MissingMandatoryValue):
        return f"{path}: {key} is not set: add {key}=..."
    message = str(cause).strip().splitlines()[0]
    return f"{path}: {f'{key}: ' if key else ''}{message}"


def _known_keys(key: str) -> list[str]:
    """The fields beside a misspelt one."""
    owner: Any = RunConfig()
    for part in key.split(".")[:-1]:
        owner = getattr(owner, part, owner)
    return [f.name for f in dataclasses.fields(owner)]


def check(config: RunConfig) -> None:
    """Refuse what no machine could run; ValueError names field, value and remedy."""
    in_flight = config.rollout.max_in_flight
    if in_flight and in_flight < config.rollout.batch_size:
        raise ValueError(
            f"rollout.max_in_flight={in_flight}: must be 0 or at least rollout.batch_size ({config.rollout.batch_size})"
        )
    for name, (lowest, highest) in RANGES.items():
        value = _field(config, name)
        if value is not None and not lowest <= value <= highest:
            raise ValueError(f"{name}={value!r}: must be at least {lowest:g}, at most {highest:g}")
    for name, choices in CHOICES.items():
        if _field(config, name) not in choices:
            raise ValueError(f"{name}={_field(config, name)!r}: must be one of {', '.join(choices)}")


def _field(config: RunConfig, name: str) -> Any:
    section, field_name = name.split(".")
    return getattr(getattr(config, section), field_name)


def settings_of(plugin: type, given: dict[str, Any], where: str) -> Any:
    """`plugin.Settings` filled from a mapping; an unknown key or a bad value is a ValueError that names it."""
    known = [f.name for f in dataclasses.fields(plugin.Settings)]
    for key in given:
        if key not in known:
            raise ValueError(f"unknown key '{where}.settings.{key}'; known here: {', '.join(known)}")
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(plugin.Settings), given))
    except OmegaConfBaseException as error:
        raise ValueError(f"{where}.settings.{error.full_key}: {str(error).splitlines()[0]}") from error
