"""Settings that nothing reads, and settings that move the same quantity.

Group size, temperature, normalisation and curriculum all change how advantages are distributed. With one of them
changed, a run that goes better or worse tells why; with two it does not.
Techniques of other rooms (reference, token masks, clips, length penalty, learning rate) combine freely.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from nemo_flashrl.algorithms.algorithm import Algorithm
from nemo_flashrl.config import RunConfig

_GROUP = "noise of the group's mean and std (1 / sqrt G), share of tied groups, prompts of a batch"
_TEMPERATURE = "spread of rewards inside a group, entropy, log-probs and ratios"
_NORMALISATION = "scale of every advantage, weight of easy and hard prompts"
_CURRICULUM = "which prompts come, so success, ties and the batch's mean reward"
ABOVE_ZERO = "above 0"
READ_ONLY_WITH = (  # a switch, the values that switch on, and the settings that are read with these alone
    ("kl.coefficient", ABOVE_ZERO, ("kl.schedule", "kl.place")),
    ("kl.schedule", "adaptive", ("kl.target",)),
    ("kl.schedule", "entropy", ("kl.entropy_floor", "kl.entropy_fall")),
    ("reference.mode", "frozen or hard or ema", ("kl.estimator", "reference.evaluate")),
    ("reference.mode", "hard", ("reference.every",)),
    ("reference.mode", "ema", ("reference.beta",)),
    ("curriculum.mode", "adaptive", tuple(f"curriculum.{name}" for name in ("classes", "share", "floor", "mixture"))),
    ("group_size.every", ABOVE_ZERO, ("group_size.threshold",)),
    ("lora.rank", ABOVE_ZERO, ("lora.alpha", "lora.targets")),
    ("value_head.learning_rate", ABOVE_ZERO, ("value_head.updates",)),
    # Its limit may stand ready, as conf/budget/1000h.yaml has it.
    ("length_penalty.coefficient", ABOVE_ZERO, ("length_penalty.unit", "length_penalty.decay_steps")),
    ("evaluation.every_steps", ABOVE_ZERO, ("evaluation.tasks", "evaluation.samples", "evaluation.temperature")),
)


@dataclass(frozen=True)
class Changed:
    """A setting away from its default."""

    room: str
    setting: str
    value: Any
    default: Any
    touches: str


def changed_settings(config: RunConfig, algorithm: Algorithm) -> list[Changed]:
    """Of those that move the distribution of advantages."""
    own, usual = algorithm.settings, type(algorithm.settings)()
    rollout, plain = config.rollout, RunConfig()
    looked_at = [
        ("group size", "algorithm.settings.group_size", own, usual, _GROUP),
        ("group size", "group_size.every", config.group_size, plain.group_size, _GROUP),
        ("temperature", "rollout.temperature", rollout, plain.rollout, _TEMPERATURE),
        ("temperature", "rollout.temperature_schedule", rollout, plain.rollout, _TEMPERATURE),
        ("normalisation", "algorithm.settings.normalisation", own, usual, _NORMALISATION),
        ("normalisation", "algorithm.settings.normalise", own, usual, _NORMALISATION),
        ("curriculum", "curriculum.mode", config.curriculum, plain.curriculum, _CURRICULUM),
    ]
    found = []
    for room, setting, values, defaults, touches in looked_at:
        name = setting.rpartition(".")[2]
        value, default = getattr(values, name, None), getattr(defaults, name, None)
        if value != default:
            found.append(Changed(room, setting, value, default, touches))
    return found


def conflict_table(changed: list[Changed]) -> str:
    """What a person reads; empty where no two rooms are changed."""
    rooms = list(dict.fromkeys(item.room for item in changed))
    if len(rooms) < 2:
        return ""
    rows = [("setting", "value", "default", "moves")]
    rows += [(item.setting, str(item.value), str(item.default), item.touches) for item in changed]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"{' and '.join(rooms)} all move the distribution of advantages: their effects are confounded."]
    lines += [
        "  " + "  ".join([*(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows
    ]
    return "\n".join(
        [*lines, "  change one at a time (`flashrl ablate` does that), or set trainer.strict=true to refuse this"]
    )


def settings_without_effect(config: RunConfig) -> list[str]:
    """One line for each setting away from its default that nothing reads as the others stand."""
    plain, lines = RunConfig(), []
    for switch, needed, names in READ_ONLY_WITH:
        value = _value(config, switch)
        on = value > 0 if needed == ABOVE_ZERO else value in needed.split(" or ")
        for name in () if on else names:
            if _value(config, name) != _value(plain, name):
                given = f"{name}={_value(config, name)}"
                lines.append(f"{given} has no effect with {switch}={value}: set {switch} {needed}, or leave {name} out")
    if config.rollout.temperature_schedule and config.rollout.temperature != plain.rollout.temperature:
        given = f"rollout.temperature={config.rollout.temperature}"
        lines.append(f"{given} has no effect with rollout.temperature_schedule: leave one of them out")
    return lines


def _value(config: RunConfig, name: str) -> Any:
    section, field = name.split(".")
    return getattr(getattr(config, section), field)


def report_conflicts(config: RunConfig, algorithm: Algorithm, *, shown: bool) -> None:
    """Print the table where there is one, and settings without effect.

    Raises:
        ValueError: `trainer.strict` and two rooms are changed, or a setting has no effect.
    """
    idle = settings_without_effect(config)
    if idle and config.trainer.strict:
        raise ValueError(f"trainer.strict=True: {idle[0]}, or set trainer.strict=false")
    if shown:
        for line in idle:
            print(line, file=sys.stderr)
    changed = changed_settings(config, algorithm)
    table = conflict_table(changed)
    if table and config.trainer.strict:
        names = ", ".join(f"{item.setting}={item.value}" for item in changed)
        raise ValueError(
            f"trainer.strict=True: {names} move the distribution of advantages together: set all but one back to its "
            "default, or trainer.strict=false"
        )
    if table and shown:
        print(table, file=sys.stderr)
