"""Rules about the sampler and its distance from the policy in training."""

from __future__ import annotations

import numpy as np

from nemo_flashrl.doctor.rule import Rule, last_steps, long_enough, recent, setting, steps_where, thirds
from nemo_flashrl.run.record import RunRecord

LOW_ACCEPTANCE = 0.7  # of stale trajectories, over which a step still has most of its batch
FRESH_ACCEPTANCE = 0.95  # of trajectories that the very weights in training have sampled: nearly all should pass
FEWEST_SYNCS = 3
ROUNDING_NATS = 2e-5  # between trainer and server in fp32, whatever the step
MOSTLY_TRUNCATED, OFTEN = 0.9, 0.1  # of the actions
MISMATCH_NATS = 0.02  # bf16 engines differ from a trainer by 1e-3 to 1e-2 per token on the same weights


def _gate_stale(run: RunRecord) -> str:
    acceptance, age = recent(run.column("gate_acceptance")), recent(run.column("staleness_mean"))
    if not (acceptance < LOW_ACCEPTANCE and age >= 0.5):
        return ""
    return f"gate_acceptance is {acceptance:.2f} at {last_steps(run)}, with staleness_mean {age:.1f} versions"


def _mismatch(run: RunRecord) -> str:
    difference, fresh = run.column("logprob_difference"), run.column("staleness_max") == 0
    if not fresh.any():
        return ""
    bad = fresh & (difference > MISMATCH_NATS)
    if bad.sum() * 2 <= fresh.sum():
        return ""
    worst = np.nanmean(difference[bad])
    return f"logprob_difference is {worst:.3g} nats per token at {steps_where(run, bad)} on-policy (staleness_max 0)"


def _sync_drifts(run: RunRecord) -> str:
    """A part of the weights that the sampler never renews is further off after each sync."""
    column = run.column("weight_sync_logprob_difference")
    distance = column[np.isfinite(column)]
    if len(distance) < FEWEST_SYNCS or distance[-1] < ROUNDING_NATS:
        return ""
    before, after = thirds(distance)
    steady = long_enough(run) or bool((np.diff(distance) > 0).all())
    if not (distance[-1] > 10 * distance[0] or (steady and after > 2 * before)):
        return ""
    steps = steps_where(run, np.isfinite(column))
    return f"weight_sync_logprob_difference went from {distance[0]:.2g} to {distance[-1]:.2g} nats per token, {steps}"


def _gate_strict(run: RunRecord) -> str:
    acceptance, fresh = run.column("gate_acceptance"), run.column("staleness_max") == 0
    share = recent(acceptance[fresh], len(fresh))
    if _mismatch(run) or not share < FRESH_ACCEPTANCE:
        return ""
    return (
        f"gate_acceptance is {share:.2f} over the steps with staleness_max 0; sequence_kl is "
        f"{recent(run.column('sequence_kl')):.2g}, delta is {setting(run, 'algorithm.settings.delta', 3e-3)}"
    )


def _clip(run: RunRecord) -> str:
    """GRPO clips a ratio on the advantage's side alone, so that with no room at all about half is clipped."""
    fraction = recent(run.column("clip_fraction"))
    if not fraction > 0.3:
        return ""
    most = "; 0.5 is what no clip range at all would give" if setting(run, "algorithm.name") == "grpo" else ""
    return f"clip_fraction is {fraction:.2f} at {last_steps(run)}{most}"


def _extreme(run: RunRecord) -> str:
    guarded = run.column("dropped_ratio_guard")
    if not recent(guarded) >= 1:
        return ""
    return f"dropped_ratio_guard counts trajectories at {steps_where(run, guarded > 0)}"


def _too_old(run: RunRecord) -> str:
    dropped = run.column("dropped_too_old")
    share = recent(dropped) / float(setting(run, "rollout.batch_size") or np.inf)
    if not share > 0.2:
        return ""
    return f"dropped_too_old is {recent(dropped):.1f} a step at {last_steps(run)}, {share:.0%} of a batch"


def _environment_errors(run: RunRecord) -> str:
    errors = run.column("episodes_environment_error")
    ends = [n for n in run.steps[-1] if n.startswith("episodes_") and n != "episodes_in_flight"]
    total = sum(np.nan_to_num(run.column(name)) for name in ends)
    share = recent(errors / np.maximum(total, 1))
    if not share > 0.1:
        return ""
    return f"episodes_environment_error is {share:.0%} of the episodes at {last_steps(run)}"


def _runs_on(run: RunRecord, metric: str, most: float) -> str:
    share = run.column(metric)
    if not recent(share) > most:
        return ""
    return f"{metric} is {recent(share):.0%} of the actions at {steps_where(run, share > most)}"


def _cut_by_context(run: RunRecord) -> str:
    ends = [n for n in run.steps[-1] if n.startswith("episodes_") and n != "episodes_in_flight"]
    total = sum(np.nan_to_num(run.column(name)) for name in ends)
    limits = run.column("episodes_token_limit") + run.column("episodes_turn_limit")
    share = recent(limits / np.maximum(total, 1))
    if not share > 0.3:
        return ""
    return f"{share:.0%} of the episodes end at a limit (episodes_token_limit, episodes_turn_limit), {last_steps(run)}"


SAMPLING_RULES = (
    Rule(
        "sampler_mismatch",
        "Sampler and trainer log-probs disagree on-policy",
        _mismatch,
        (
            "sampling temperature differs from that of the trainer's log-probs",
            "weight sync did not reach the sampler",
            "different numerics in the engine (quantised weights, fp8 KV cache, another RoPE scaling)",
        ),
        "sample at rollout.temperature alone: no top-p, top-k or penalties in the engine; same precision",
    ),
    Rule(
        "sync_drifts",
        "After each weight sync the sampler is further from the trainer",
        _sync_drifts,
        (
            "a part of the weights that the server does not renew: a tied LM head, a packed or quantised copy",
            "a prefix cache or KV cache that is kept over the sync",
            "rounding: the server in bf16, or logits that grow",
        ),
        "a server started by `flashrl serve-rollout` and of the vLLM version that the docs name; the same precision on "
        "both sides (model.precision); compare with a restarted server",
    ),
    Rule(
        "gate_rejects_stale",
        "The gate rejects many trajectories: rollouts are stale",
        _gate_stale,
        ("too many policy versions between sampling and training", "learning rate too high for that staleness"),
        "rollout.max_staleness, rollout.lag or rollout.max_in_flight lower; optimizer.learning_rate lower",
    ),
    Rule(
        "gate_rejects_fresh",
        "The gate rejects on-policy trajectories",
        _gate_strict,
        ("delta too small for the engine's rounding error", "a sampler in lower precision than the trainer"),
        "algorithm.settings.delta up (3e-3 is the paper's value)",
    ),
    Rule(
        "clipped",
        "Many tokens are clipped",
        _clip,
        ("too many updates per batch, or stale batches", "clip range too narrow", "learning rate too high"),
        "clip_low and clip_high, or ratio_clip, to 0.05 to 0.2 or wider; rollout.lag or optimizer.learning_rate lower",
    ),
    Rule(
        "extreme_ratios",
        "Trajectories are dropped for extreme importance ratios",
        _extreme,
        ("a sampler bug: wrong log-probs for single tokens", "prefix cache not reset at the weight sync"),
        "check the engine's log-probs first; a higher algorithm.settings.ratio_guard only hides it",
    ),
    Rule(
        "too_old",
        "Many trajectories are too stale to train on",
        _too_old,
        ("episodes much longer than a training step", "more episodes in flight than training consumes"),
        "rollout.max_staleness up, rollout.max_in_flight lower, or more rollout GPUs",
    ),
    Rule(
        "environment_errors",
        "Environment errors",
        _environment_errors,
        ("tools or servers that time out", "a bug in the environment"),
        "read `info.error` in trajectories.jsonl; rollout.step_timeout up",
    ),
    Rule(
        "answers_never_end",
        "Nearly every answer runs to its token limit",
        lambda run: _runs_on(run, "actions_truncated", MOSTLY_TRUNCATED),
        (
            "the token with which the model ends an answer is none of eos_token_id in config.json, "
            "generation_config.json and tokenizer_config.json",
            "rollout.max_tokens_per_turn below what an answer needs",
            "a base model, which has not learnt to end",
        ),
        "name the model's end token in rollout.stop; rollout.max_tokens_per_turn up",
    ),
    Rule(
        "answers_go_on",
        "Answers go on after a special token of the chat template",
        lambda run: _runs_on(run, "actions_with_chat_tokens", OFTEN),
        (
            "the model's end token is none of those that stop an answer: junk is sampled after it, and trained",
            "a chat template that is not the model's",
        ),
        "name the token in rollout.stop; copy tokenizer_config.json and chat_template.jinja of the model again",
    ),
    Rule(
        "cut_by_limits",
        "Many episodes end at a limit (truncated)",
        _cut_by_context,
        ("limits below what the task needs", "a policy that loops", "observations too long"),
        "rollout.max_turns or model.context_length up; rollout.max_observation_tokens lower",
    ),
)
