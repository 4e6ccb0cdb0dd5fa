"""Lets the NeMo Framework Launcher find our job files, `rlhf_ppo=flashrl/...` and `training=nemotron/flashrl_...`."""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class LauncherJobFiles(SearchPathPlugin):
    """Hydra loads every plugin in every application: appended last, ours can hide nobody's file."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folder of job files."""
        search_path.append("nemo_flashrl", "pkg://nemo_flashrl.conf.nemo_launcher")
