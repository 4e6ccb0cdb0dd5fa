"""Keys that an earlier version named otherwise: refused where a user writes them, translated in a run's own record."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

RENAMED = {  # since 0.1.0
    "rollout.uses": "rollout.updates_per_batch",
    "rollout.tied_group_replacements": "rollout.dynamic_sampling_max_groups",
    "optimizer.clip_gradient": "optimizer.max_grad_norm",
    "monitors.selected": "monitors.effective_fraction",
}


def refuse_renamed(config: DictConfig, path: Path) -> None:
    """ValueError gives the new name of the first renamed key that `config`, read from `path`, sets."""
    for old, new in RENAMED.items():
        if _sets(config, old):
            raise ValueError(f"{path}: {old} is now {new}")


def with_new_names(config: DictConfig) -> DictConfig:
    """`config`, changed in place: the value of each renamed key stands under its new name."""
    for old, new in RENAMED.items():
        if _sets(config, old):
            section, field = old.split(".")
            OmegaConf.update(config, new, config[section].pop(field))
    return config


def _sets(config: DictConfig, key: str) -> bool:
    section, field = key.split(".")
    return isinstance(config.get(section), DictConfig) and field in config[section]
