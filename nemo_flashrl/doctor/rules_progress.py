"""Rules about the course of a run: what was learnt and lost again, what is never learnt, what is learnt by heart."""

from __future__ import annotations

import numpy as np

from nemo_flashrl.doctor.rule import Rule, early, last_steps, long_enough, recent, setting, thirds
from nemo_flashrl.doctor.rules_learning import SOLVED, equal_rewards, reward_hacking
from nemo_flashrl.run.record import RunRecord

CLIFF_STEPS = 15  # in which the middle half of a fall happens, for it to be a cliff
STEPS_TO_PROGRESS = 50  # from which on a flat reward is a finding
STANDARD_ERRORS = 4  # a best of many windows is above the mean by chance, so more than the usual two


def _noise(values: np.ndarray) -> float:
    """Standard deviation of a step about the trend: that of the differences of consecutive steps, over sqrt(2)."""
    finite = values[np.isfinite(values)]
    return float(np.diff(finite).std() / np.sqrt(2)) if len(finite) > 2 else float("nan")


def _fall(run: RunRecord, name: str, window: int) -> tuple[float, float, int, int] | None:
    """(best mean of `window` steps, the last such mean, first and last step of the fall's middle half).

    None where the difference is within the noise, or below 10% of the best; of success, below 5 points.
    """
    values = run.column(name)
    known = np.flatnonzero(np.isfinite(values))
    if len(known) < 2 * window:
        return None
    means = np.convolve(values[known], np.ones(window) / window, "valid")
    top = int(np.flatnonzero(means == means.max())[-1])
    best, last = float(means[top]), float(means[-1])
    scale = max(abs(best), recent(run.column("reward_std")) if name == "reward_mean" else 0.0)
    noise, least = _noise(values), 0.1 * scale
    if name == "success":  # a few rare successes: the steps' own differences may show less noise than there is
        middle, batch = (best + last) / 2, float(setting(run, "rollout.batch_size") or np.inf)
        noise, least = max(noise, np.sqrt(middle * (1 - middle) / batch)), max(least, 0.05)
    least = max(STANDARD_ERRORS * noise * np.sqrt(2 / window), least)
    if not best - last > least:
        return None
    after = means[top:]
    high = np.flatnonzero(after >= best - (best - last) / 4)[-1]
    low = high + np.flatnonzero(after[high:] <= best - 3 * (best - last) / 4)[0]
    steps = [int(run.steps[known[top + place + window // 2]]["step"]) for place in (high, low)]
    return best, last, steps[0], steps[1]


def _meanwhile(run: RunRecord) -> str:
    """What else moved far between the first and the last steps."""
    told = []
    for name, moved in (
        ("repeated_token_share", lambda a, b: b > a + 0.1),
        ("response_tokens", lambda a, b: not a / 1.5 <= b <= a * 1.5),
        ("kl", lambda a, b: b > 0.1 and b > 3 * a),
        ("sampled_entropy", lambda a, b: not a / 3 <= b <= a * 3),
        ("gate_acceptance", lambda a, b: b < a - 0.3),
    ):
        first, last = early(run.column(name), 5), recent(run.column(name), 5)
        if np.isfinite(first) and np.isfinite(last) and moved(first, last):
            told.append(f"{name} from {first:.3g} to {last:.3g}")
    return f"; since the first steps {', '.join(told)}" if told else ""


def _reward_cliff(run: RunRecord) -> str:
    spread = recent(run.column("reward_std"), len(run.steps))
    for name, least in (("success", 0.1), ("reward_mean", 0.5 * spread if np.isfinite(spread) else 0.0)):
        fall = _fall(run, name, 5)
        if fall is None:
            continue
        best, last, start, end = fall
        if best - last >= max(0.5 * abs(best), least) and end - start <= CLIFF_STEPS:
            return f"{name} fell from {best:.3g} to {last:.3g}, most of it in steps {start}-{end}{_meanwhile(run)}"
    return ""


def _reward_decline(run: RunRecord) -> str:
    if _reward_cliff(run):
        return ""
    for name in ("success", "reward_mean"):
        fall = _fall(run, name, max(10, len(run.steps) // 10))
        if fall is not None:
            best, last, start, end = fall
            return f"{name} fell from {best:.3g} to {last:.3g}, half of it in steps {start}-{end}{_meanwhile(run)}"
    return ""


def _is_flat(values: np.ndarray, tolerance: float) -> bool:
    first, last = thirds(values)
    third = max(np.isfinite(values).sum() // 3, 1)
    return bool(abs(last - first) < max(tolerance, 2 * _noise(values) * np.sqrt(2 / third)))


def _no_progress(run: RunRecord) -> str:
    success, reward = run.column("success"), run.column("reward_mean")
    flat = _is_flat(success, 0.03) and _is_flat(reward, 0.1 * recent(run.column("reward_std")))
    if len(run.steps) < STEPS_TO_PROGRESS or not flat or recent(success) >= SOLVED:
        return ""
    if equal_rewards(run) or _reward_cliff(run) or _reward_decline(run):
        return ""
    (first, last), (before, after) = thirds(success), thirds(reward)
    seen = [
        f"success {first:.3g} in the first and {last:.3g} in the last third of {len(run.steps)} steps",
        f"reward_mean {before:.3g} and {after:.3g}",
    ]
    for name in (
        *("unique_sample_share", "sampled_entropy", "kl", "beta", "effective_fraction", "gate_acceptance"),
        *("learning_rate", "action_token_share"),
    ):
        value = recent(run.column(name))
        seen += [f"{name} {value:.3g}"] if np.isfinite(value) else []
    return ", ".join(seen)


def _low_action_share(run: RunRecord) -> str:
    share = recent(run.column("action_token_share"))
    if not (long_enough(run) and share < 0.05):
        return ""
    return f"action_token_share is {share:.1%} at {last_steps(run)}: of all tokens computed, those that can be learnt"


def _overfits(run: RunRecord) -> str:
    """Held-out success below its best while training success has risen over the run and not fallen since that best."""
    held_out, success = run.column("evaluation_success"), run.column("success")
    known = np.flatnonzero(np.isfinite(held_out))
    if len(known) < 4:
        return ""
    pairs = (held_out[known][1:] + held_out[known][:-1]) / 2
    top, last = int(pairs.argmax()), float(pairs[-1])
    best, at = float(pairs[top]), int(known[top + 1])
    middle = (best + last) / 2
    episodes = 2 * float(setting(run, "evaluation.tasks", 64)) * float(setting(run, "evaluation.samples", 1))
    error = np.sqrt(2 * middle * (1 - middle) / episodes)
    first, then, now = early(success), recent(success[: at + 1]), recent(success)
    rose = now - first > max(0.03, 2 * _noise(success) * np.sqrt(2 / 10))
    if not (best - last > max(0.05, 2 * error) and rose and now > then - 0.03):
        return ""
    return (
        f"evaluation_success fell from {best:.3g} (step {run.steps[at]['step']}) to {last:.3g} (step "
        f"{run.steps[known[-1]]['step']}) while success went from {first:.3g} over {then:.3g} to {now:.3g}"
    )


def _length_grows(run: RunRecord) -> str:
    """Where the reward rises with the length and success does not, that is reward hacking, which is its own rule."""
    length, success = run.column("response_tokens"), run.column("success")
    grown = recent(length) / early(length, 5)
    gain = recent(success) - early(success, 5)
    if not (long_enough(run) and grown > 1.8 and gain < 0.05) or reward_hacking(run):
        return ""
    return (
        f"response_tokens from {early(length, 5):.0f} to {recent(length):.0f} ({grown:.1f} times) with success from "
        f"{early(success, 5):.2f} to {recent(success):.2f}"
    )


PROGRESS_RULES = (
    Rule(
        "reward_cliff",
        "Reward cliff: success or reward collapses",
        _reward_cliff,
        (
            "one update too large: learning rate, or a rare advantage that is neither normalised nor clipped",
            "the policy has drifted: no KL term, or stale rollouts that pass the gate",
            "a reward that pays for something else, such as repeating calls",
            "the environment, the reward or the curriculum changed at that step",
        ),
        "resume from the checkpoint before the fall with optimizer.learning_rate lower, advantage.clip=3 and a KL "
        "(kl.coefficient=0.01, reference.mode=ema); monitors.success_drop=0.2 stops the next run in time",
    ),
    Rule(
        "reward_decline",
        "Slow decline of success or reward",
        _reward_decline,
        (
            "the policy drifts away from what worked: no KL term, or a reference that lags too little",
            "learning rate too high for the rest of the run, or weight decay that outweighs what is learnt",
            "rollouts that repeat each other: the policy narrows",
            "the curriculum moves to harder tasks",
        ),
        "in this order: diversity (rollout.temperature=1.0), KL (kl.coefficient=0.01 with reference.mode=ema or hard), "
        "then optimizer.weight_decay=0 and optimizer.schedule=cosine or a lower learning rate, then the reward; "
        "monitors.success_drop stops a run",
    ),
    Rule(
        "no_progress",
        "No progress: success and reward stay where they were",
        _no_progress,
        (
            "rollouts of a prompt that do not differ, or tasks far too hard or too easy: no advantage to learn from",
            "learning rate too low, or a KL coefficient that locks the policy to its reference (0.05 or more)",
            "a reward that does not depend on what the policy does",
            "the loss sees too few of the tokens: long prompts and observations, a token mask, a gate that rejects",
        ),
        "in this order: diversity (`flashrl doctor groups CONFIG --show 20`; rollout.temperature=1.0, larger groups, "
        "below 5% success easier tasks or a warm start), KL (kl.coefficient below 0.05; with kl near 0 a higher "
        "optimizer.learning_rate, up to 3e-6), reward (`flashrl doctor rewards CONFIG`)",
    ),
    Rule(
        "overfits",
        "Overfitting: training success rises, held-out success falls",
        _overfits,
        ("few tasks, seen many times", "a group size so large that a batch holds few prompts", "no KL term"),
        "more tasks, algorithm.settings.group_size lower, fewer steps (use the checkpoint before the fall), "
        "kl.coefficient=0.01 with reference.mode=frozen or ema",
    ),
    Rule(
        "length_grows",
        "Length grows without success",
        _length_grows,
        (
            "a failed trajectory's tokens share its penalty, so longer failures cost each token less",
            "a shaping term or process reward that pays per turn",
            "no cost on length",
        ),
        "length_penalty.coefficient=0.1 with length_penalty.limit near the first steps' response_tokens; "
        "rollout.max_tokens_per_turn or max_turns lower; GRPO: algorithm.settings.aggregation=token_mean or "
        "sequence_sum; monitors.length_trend stops a run",
    ),
    Rule(
        "low_action_share",
        "Low action share: hardly any of the tokens are the policy's",
        _low_action_share,
        ("observations or the prompt dominate the context", "episodes that end after a few tokens"),
        "rollout.max_observation_tokens lower (with rollout.keep_observation=both or a rollout.summarizer), a shorter "
        "prompt",
    ),
)
