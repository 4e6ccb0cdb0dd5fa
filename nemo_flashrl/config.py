"""The typed configuration of a run, and the only reader of YAML.

A configuration file is composed by Hydra: a `defaults` list may name files under `conf/`, and `key=value` overrides
come last. Plug-ins (algorithm, environment) declare their settings beside their class; here they are a plain mapping.
"""

from __future__ import annotations

import dataclasses
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

    max_tokens_per_microbatch: int = 16384
    layout: str = "packed"  # "packed": one row, attention inside each trajectory | "padded": a row each
    context_margin: float = 0.0
    on_too_long: str = "error"  # "error" | "truncate" | "drop"


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
    rollout = config.rollout
    rules: list[tuple[bool, str, Any, str]] = [
        (config.model.precision in {"bf16", "fp32"}, "model.precision", config.model.precision, "bf16 or fp32"),
        (
            config.model.recompute in {"none", "selective", "full"},
            "model.recompute",
            config.model.recompute,
            "none, selective or full",
        ),
        (rollout.batch_size >= 1, "rollout.batch_size", rollout.batch_size, "at least 1"),
        (
            rollout.max_in_flight == 0 or rollout.max_in_flight >= rollout.batch_size,
            "rollout.max_in_flight",
            rollout.max_in_flight,
            f"0 or at least rollout.batch_size ({rollout.batch_size})",
        ),
        (rollout.lag >= 0, "rollout.lag", rollout.lag, "0 or more"),
        (rollout.temperature > 0, "rollout.temperature", rollout.temperature, "above 0"),
        (rollout.max_turns >= 1, "rollout.max_turns", rollout.max_turns, "at least 1"),
        (rollout.max_tokens_per_turn >= 1, "rollout.max_tokens_per_turn", rollout.max_tokens_per_turn, "at least 1"),
        (rollout.step_timeout > 0, "rollout.step_timeout", rollout.step_timeout, "above 0 seconds"),
        (config.parallel.tensor >= 1, "parallel.tensor", config.parallel.tensor, "at least 1"),
        (config.parallel.pipeline >= 1, "parallel.pipeline", config.parallel.pipeline, "at least 1"),
        (config.trainer.steps >= 1, "trainer.steps", config.trainer.steps, "at least 1"),
        (config.optimizer.learning_rate > 0, "optimizer.learning_rate", config.optimizer.learning_rate, "above 0"),
        (config.optimizer.warmup_steps >= 0, "optimizer.warmup_steps", config.optimizer.warmup_steps, "0 or more"),
        (config.optimizer.clip_gradient > 0, "optimizer.clip_gradient", config.optimizer.clip_gradient, "above 0"),
        (config.model.context_length >= 2, "model.context_length", config.model.context_length, "at least 2"),
    ]
    for holds, name, value, remedy in rules:
        if not holds:
            raise ValueError(f"{name}={value!r}: must be {remedy}")


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
