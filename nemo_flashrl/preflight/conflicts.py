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
from nemo_flashrl.metrics.novelty import NGRAMS, SENTENCES

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
    ("curriculum.mode", "adaptive", ("curriculum.rule", "curriculum.share", "curriculum.floor")),
    ("curriculum.rule", "threshold", ("curriculum.threshold",)),
    ("group_size.every", ABOVE_ZERO, ("group_size.threshold",)),
    ("group_size.max", ABOVE_ZERO, ("group_size.min",)),
    ("lora.rank", ABOVE_ZERO, ("lora.alpha", "lora.targets")),
    ("value_head.learning_rate", ABOVE_ZERO, ("value_head.updates",)),
    # Its limit may stand ready, as conf/budget/1000h.yaml has it.
    ("length_penalty.coefficient", ABOVE_ZERO, ("length_penalty.unit", "length_penalty.decay_steps")),
    ("length_penalty.unit", "new_tokens", ("length_penalty.novelty",)),
    ("evaluation.every_steps", ABOVE_ZERO, ("evaluation.tasks", "evaluation.samples", "evaluation.temperature")),
)

KL_HOLDS_NOTHING, KL_USUAL, KL_LOCKS = 0.001, 0.01, 0.05  # coefficients of a KL in the loss
FEW_ROLLOUTS, MANY_ROLLOUTS = 4, 32  # of a prompt
GRADED = ("reasoning_gym",)  # shipped environments whose reward has values between 0 and 1
WITHOUT_FENCES = ("key_value_store", "python_tool", "reasoning_gym", "textworld", "verifiable_math")


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
        ("group size", "group_size.max", config.group_size, plain.group_size, _GROUP),
        ("temperature", "rollout.temperature", rollout, plain.rollout, _TEMPERATURE),
        ("temperature", "rollout.temperature_schedule", rollout, plain.rollout, _TEMPERATURE),
        ("normalisation", "algorithm.settings.normalisation", own, usual, _NORMALISATION),
        ("normalisation", "algorithm.settings.normalise", own, usual, _NORMALISATION),
        ("curriculum", "curriculum.mode", config.curriculum, plain.curriculum, _CURRICULUM),
        ("curriculum", "curriculum.mixture", config.curriculum, plain.curriculum, _CURRICULUM),
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
    if (novelty := config.length_penalty.novelty) in (NGRAMS, SENTENCES):
        similarity = config.length_penalty.similarity
        if similarity != plain.length_penalty.similarity:
            given = f"length_penalty.similarity={similarity} has no effect with length_penalty.novelty={novelty}"
            lines.append(f"{given}: set an embedder, or leave length_penalty.similarity out")
    curriculum = config.curriculum
    if curriculum.classes and curriculum.mode == "none" and not (curriculum.mixture or config.evaluation.every_steps):
        given = f"curriculum.classes={curriculum.classes} has no effect with curriculum.mode=none"
        lines.append(f"{given}: set curriculum.mode adaptive, a curriculum.mixture or evaluation.every_steps")
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
    if shown:
        for line in beyond_bounds(config, algorithm):
            print(f"warning: {line}", file=sys.stderr)


def beyond_bounds(config: RunConfig, algorithm: Algorithm) -> list[str]:
    """Settings beyond the bounds of docs/techniques.md, a line each: what happens there, and what to set instead."""
    found, kl = [], config.kl
    normalisation, group_size = getattr(algorithm.settings, "normalisation", ""), algorithm.group_size
    prompts, environment = config.rollout.batch_size // group_size, config.environment.name
    if kl.place == "loss" and kl.coefficient >= KL_LOCKS:
        found.append(
            f"kl.coefficient={kl.coefficient:g}: from {KL_LOCKS:g} on it locks the policy to its reference; "
            f"{KL_USUAL:g} is usual"
        )
    if kl.place == "loss" and 0 < kl.coefficient <= KL_HOLDS_NOTHING:
        found.append(
            f"kl.coefficient={kl.coefficient:g}: at {KL_HOLDS_NOTHING:g} or less it holds nothing and the KL explodes; "
            f"{KL_USUAL:g} is usual"
        )
    if 1 < group_size <= FEW_ROLLOUTS and not (kl.place == "loss" and KL_USUAL <= kl.coefficient < KL_LOCKS):
        found.append(
            f"algorithm.settings.group_size={group_size}: advantages of so few rollouts are noisy, the policy drifts; "
            f"kl.coefficient={KL_USUAL:g} to below {KL_LOCKS:g} with a reference, or groups of 8"
        )
    if group_size >= MANY_ROLLOUTS:
        found.append(
            f"algorithm.settings.group_size={group_size}: a batch holds {prompts} prompts, "
            "which the policy overfits; groups of 8 or 16, and evaluation.every_steps above 0 to see it"
        )
    if kl.place == "reward" and kl.coefficient > 0 and normalisation in ("z_score", "quantile"):
        found.append(
            f"kl.place=reward with normalisation={normalisation}: in a group of equal rewards the KL alone decides, as "
            "full advantages; set kl.place=loss, or normalisation=none"
        )
    if normalisation == "quantile" and environment in GRADED:
        found.append(
            f"normalisation=quantile with environment.name={environment}: only ranks count, so a score of 0.1 "
            "among zeros gets the advantage of a 1 (G=4: +0.75); set normalisation=none, which keeps the distance"
        )
    if config.selection.tokens == "code" and environment in WITHOUT_FENCES:
        found.append(
            f"selection.tokens=code with environment.name={environment}: its prompts ask for no ``` fences "
            "and a trajectory without any is left out; set selection.tokens=actions"
        )
    return found
