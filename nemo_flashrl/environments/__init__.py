"""Tasks: one file each, found by bare name in this folder or by dotted path in the user's own package."""

from __future__ import annotations

from nemo_flashrl.environments.environment import Environment, Message, StepResult

__all__ = ["Environment", "Message", "StepResult", "load"]


def load(name: str) -> type[Environment]:
    """The environment class called `name`: `key_value_store`, or `my_package.my_module.MyEnvironment`.

    Raises:
        ValueError: there is no such module or class.
    """
    from nemo_flashrl.plugins import load_class

    return load_class("nemo_flashrl.environments", name)
