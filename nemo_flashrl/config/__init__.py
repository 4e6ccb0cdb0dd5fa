"""The configuration of a run: `schema` holds its fields, `loading` reads and checks it."""

from __future__ import annotations

from nemo_flashrl.config.loading import check, conf_folder, load, load_saved, read_plain, save, settings_of
from nemo_flashrl.config.overrides import quoted
from nemo_flashrl.config.schema import PluginConfig, RunConfig

__all__ = [
    "PluginConfig",
    "RunConfig",
    "check",
    "conf_folder",
    "load",
    "load_saved",
    "quoted",
    "read_plain",
    "save",
    "settings_of",
]
