"""Rules about what the policy learns: numbers that blow up, rewards that are gamed, signals that have gone."""

from __future__ import annotations

import numpy as np

from nemo_flashrl.doctor.rule import (
    RECENT,
    Rule,
    early,
    last_steps,
    long_enough,
    recent,
    setting,
    steps_where,
    thirds,
)
from nemo_flashrl.run.record import RunRecord

SOLVED = 0.9  # success from which ties and low entropy are what a solved task looks like


def _not_finite(run: RunRecord) -> str:
    for name in ("loss", "grad_norm"):
        bad = np.array([name in step and step[name] is None for step in run.steps])
        if bad.any():
            return f"{name} is not finite at {steps_where(run, bad)}"
    return ""


def _exploding(run: RunRecord) -> str:
    values = run.column("grad_norm")
    for end in range(15, len(values) + 1):
        before, now = values[: end - 5], values[end - 5 : end]
        usual = np.nanmedian(before[before > 0]) if (before > 0).any() else np.nan
        if np.isfinite(now).all() and np.median(now) > 10 * usual:
            there = np.arange(len(values)) == np.arange(end - 5, end)[:, None]
            return (
                f"grad_norm has median {np.median(now):.3g} at {steps_where(run, there.any(0))}, "
                f"over 10 times the {usual:.3g} before"
            )
    return ""


def _kl_runs_away(run: RunRecord) -> str:
    first, last = thirds(run.column("kl"))
    if not (long_enough(run) and last > 0.1 and last > 3 * max(first, 1e-6)):
        return ""
    return f"kl rose from {first:.3g} (first third) to {last:.3g} nats per token (last third of the steps)"


def _reference_too_far(run: RunRecord) -> str:
    kl = recent(run.column("kl"), 5)
    if setting(run, "reference.mode") not in ("ema", "hard") or not kl > 0.1:
        return ""
    return f"kl to the moving reference is {kl:.3g} nats per token at {last_steps(run, 5)}; below 0.05 is usual"


def _advantage_jump(run: RunRecord) -> str:
    values = run.column("advantage_std")
    for at in np.flatnonzero(np.isfinite(values)):
        if at < 10 or at > len(values) - 5:
            continue
        before, after = np.nanmedian(values[at - 10 : at]), np.nanmedian(values[at : at + 5])
        if before > 0 and after > 3 * before and values[at] > 2 * values[at - 1]:
            return f"advantage_std goes from {before:.3g} to {after:.3g} at step {run.steps[at]['step']}"
    return ""


def reward_hacking(run: RunRecord) -> str:
    """A reward that rises with success may take longer answers; one that rises without it pays for something else."""
    reward = run.column("reward_mean")
    if not long_enough(run) or not recent(reward) - early(reward, 5) > 0.2 * early(run.column("reward_std")):
        return ""
    seen = []
    length, turns = run.column("response_tokens"), run.column("turns")
    success = run.column("success")
    if recent(length) > 1.8 * early(length, 5) and recent(success) - early(success, 5) < 0.05:
        seen.append(
            f"response_tokens from {early(length, 5):.0f} to {recent(length):.0f} and turns from {early(turns, 5):.1f} "
            f"to {recent(turns):.1f}, with success from {early(success, 5):.2f} to {recent(success):.2f}"
        )
    repeated = run.column("repeated_token_share")
    if recent(repeated) > 0.2 and recent(repeated) > 3 * early(repeated, 5):
        seen.append(f"repeated_token_share from {early(repeated, 5):.2f} to {recent(repeated):.2f}")
    if not seen:
        return ""
    return f"reward_mean rose from {early(reward, 5):.3g} to {recent(reward):.3g} while " + ", ".join(seen)


def _entropy_collapse(run: RunRecord) -> str:
    name = "entropy" if run.has("entropy") else "sampled_entropy"  # only some algorithms compute it
    entropy = run.column(name)
    first, last, success = early(entropy), recent(entropy), recent(run.column("success"))
    if not (long_enough(run) and last < 0.2 * first and success < 0.8):
        return ""
    return f"{name} fell from {first:.3g} to {last:.3g} nats ({last_steps(run)}) with success at {success:.2f}"


def _few_unique_samples(run: RunRecord) -> str:
    share, success = recent(run.column("unique_sample_share")), recent(run.column("success"))
    if not (share < 0.6 and success < SOLVED):
        return ""
    return f"unique_sample_share is {share:.2f} at {last_steps(run)}, under 0.60; success is {success:.2f}"


def _tied_groups(run: RunRecord) -> str:
    share, success = recent(run.column("tied_groups")), recent(run.column("success"))
    if not (share > 0.5 and success < SOLVED):
        return ""
    return f"tied_groups is {share:.2f} at {last_steps(run)}: that share of the batch has no gradient"


def equal_rewards(run: RunRecord) -> str:
    """Most of the last steps had no advantage but 0."""
    deviation, success = run.column("advantage_std"), recent(run.column("success"))
    empty = (deviation[-20:] == 0) & ~(run.column("left_out_share")[-20:] == 1)
    if not (long_enough(run) and empty.mean() > 0.5 and success < SOLVED):
        return ""
    holds = np.arange(len(deviation)) >= len(deviation) - 20
    return f"advantage_std is 0 at {steps_where(run, holds & (deviation == 0))}: those steps learn nothing"


def _all_left_out(run: RunRecord) -> str:
    holds = run.column("left_out_share") == 1
    if not holds[-RECENT:].any():
        return ""
    names = ("dropped_no_code", "dropped_malformed", "dropped_shaping")
    counts = {name: recent(run.column(name)[holds]) for name in names}
    shown = ", ".join(f"{name} {count:.0f}" for name, count in counts.items() if count > 0)
    return f"left_out_share is 1 at {steps_where(run, holds)} ({shown}): those steps train nothing"


LEARNING_RULES = (
    Rule(
        "not_finite",
        "Loss or gradient is NaN or inf",
        _not_finite,
        (
            "advantages that are neither normalised nor clipped: one rare reward far from the others",
            "a reward, shaping term or log-prob that is not finite",
            "learning rate too high",
            "an overflow in the transformer layers",
        ),
        "first the advantages: algorithm.settings.normalise=true (FlashREINFORCE) or normalisation=z_score (GRPO), and "
        "advantage.clip=3; then optimizer.learning_rate down to 1e-6 with optimizer.max_grad_norm=1.0; then "
        "model.precision=fp32",
    ),
    Rule(
        "exploding_gradient",
        "Gradients explode",
        _exploding,
        ("learning rate too high", "ratios far from 1 because rollouts are stale", "the reward scale changed"),
        "advantages normalised (algorithm.settings.normalise=true or normalisation=z_score) and advantage.clip=3, "
        "optimizer.learning_rate lower, optimizer.max_grad_norm=1.0, rollout.max_staleness or rollout.lag lower",
    ),
    Rule(
        "kl_runs_away",
        "KL: the policy drifts away from the reference",
        _kl_runs_away,
        ("learning rate too high", "KL coefficient too small or zero", "a reward that is easy to hack"),
        "kl.coefficient up (0.01 to below 0.05), optimizer.learning_rate lower (1e-6 to 3e-6)",
    ),
    Rule(
        "reference_too_far",
        "The EMA reference lags far behind the policy",
        _reference_too_far,
        ("EMA decay (reference.beta) too close to 1", "learning rate too high for that decay"),
        "reference.beta lower (0.95 to 0.99) or optimizer.learning_rate lower",
    ),
    Rule(
        "advantage_jump",
        "Advantage std jumps",
        _advantage_jump,
        ("the reward scale changed (environment, reward model)", "the task mixture changed", "group size changed"),
        "keep the reward scale fixed over the run; change one of group size, temperature, normalisation at a time",
    ),
    Rule(
        "reward_hacking",
        "Reward hacking: reward rises while length or repetition explodes",
        reward_hacking,
        ("the reward pays for length or for repeated tool calls", "no cost on turns or length", "no KL term"),
        "read samples.jsonl; then a length or repetition penalty, or rollout.max_turns and max_tokens_per_turn lower",
    ),
    Rule(
        "entropy_collapse",
        "Entropy collapse before the task is learnt",
        _entropy_collapse,
        ("learning rate too high", "no KL or entropy term", "temperature too low"),
        "optimizer.learning_rate lower, rollout.temperature=1.0, kl.coefficient=0.01 to below 0.05",
    ),
    Rule(
        "few_unique_samples",
        "Samples of a prompt are (nearly) identical",
        _few_unique_samples,
        ("temperature too low", "the policy has collapsed", "group size larger than the number of distinct solutions"),
        "rollout.temperature up to 1.0; algorithm.settings.group_size lower; or flash_reinforce, which has no groups",
    ),
    Rule(
        "tied_groups",
        "Most groups have zero reward variance",
        _tied_groups,
        ("tasks too hard or too easy for the policy", "group size too small", "reward too coarse"),
        "algorithm.settings.group_size up, or a curriculum near the policy's level; flash_reinforce needs no groups",
    ),
    Rule(
        "equal_rewards",
        "Whole batches have zero reward variance",
        equal_rewards,
        ("the policy never solves a task (sparse reward)", "a broken reward", "batches too small for a rare success"),
        "easier tasks first, a better warm start, rollout.batch_size up; play one episode by hand to see the reward",
    ),
    Rule(
        "all_left_out",
        "Every trajectory of a step is left out of the loss",
        _all_left_out,
        (
            "selection.tokens=code on tasks whose answers have no fenced code",
            "selection.malformed=leave_out before the policy has learnt the format",
            "selection.shaping_at_least above what any episode reaches",
        ),
        "the selection setting that is counted: tokens=actions, malformed=keep, or a lower shaping_at_least",
    ),
)
