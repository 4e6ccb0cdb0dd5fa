"""Every number of `metrics.jsonl`: unit, meaning, and how it comes from microbatches, data-parallel ranks and stages.

Where a number comes from decides how it is reduced:

    batch    the collecting rank computes it once over the whole batch: nothing to reduce
    mean     `numerator` / the first of `denominators` that there is, both summed over microbatches and data-parallel
             ranks on the last pipeline stage, divided once, and sent from there to the rank that writes
    sum      as `mean`, without the division
    largest  the maximum over microbatches and data-parallel ranks, on the last pipeline stage
    machine  a clock, a memory counter, a count of faults; memory is the maximum over all ranks, the others are the
             writing rank's
    trainer  the same on every rank after Megatron's own reduction
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TOKENS = "policy_tokens"
BATCH, MEAN, SUM, LARGEST, MACHINE, TRAINER = "batch", "mean", "sum", "largest", "machine", "trainer"


@dataclass(frozen=True, slots=True)
class Metric:
    """One name; with a trailing `*` in it, a family of names."""

    name: str
    unit: str  # "" for a pure number
    meaning: str
    source: str = BATCH
    numerator: str = ""  # names of the sums that an algorithm reports, see `Gate.stats`
    denominators: tuple[str, ...] = ()


def _mean(name: str, unit: str, meaning: str, numerator: str, *denominators: str) -> Metric:
    return Metric(name, unit, meaning, MEAN, numerator, denominators)


def _sum(name: str, unit: str, meaning: str, numerator: str) -> Metric:
    return Metric(name, unit, meaning, SUM, numerator)


_LEARNING = (
    Metric("step", "", "optimizer steps so far, this one included", TRAINER),
    Metric("reward_mean", "reward", "mean over the batch"),
    Metric("reward_std", "reward", "standard deviation over the batch, divided by B"),
    Metric("reward_histogram", "trajectories", "counts of rewards between edges"),
    Metric("success", "share", "trajectories that the environment calls solved"),
    Metric("evaluation_success", "share", "success on held-out tasks, on the steps that evaluate"),
    Metric("evaluation_success_*", "share", "success on held-out tasks of that class (curriculum.classes)"),
    Metric("evaluation_environment_errors", "episodes", "on held-out tasks, ended by an environment error"),
    Metric("evaluation_*", "", "on held-out tasks: mean reward, and the share of tasks that one of k samples solves"),
    Metric("reference_evaluation_*", "", "the same for the reference policy"),
    Metric("advantage_std", "reward", "standard deviation of the advantages in the loss, over the batch"),
    Metric("group_reward_std", "reward", "standard deviation of rewards inside a group, mean over groups"),
    Metric("group_advantage_std", "", "standard deviation of advantages inside a group, mean over groups"),
    Metric("tied_groups", "share", "groups whose rewards are all equal (zero variance): no gradient comes from them"),
    Metric("effective_samples", "trajectories", "with a nonzero advantage and weight, before the trust-region gate"),
    Metric("advantage_clip_fraction", "share", "trajectories whose advantage was clipped at advantage.clip"),
    Metric("shaping", "reward", "added to the advantage, length penalty included, mean over the batch"),
    Metric("length_penalty", "reward", "subtracted from the advantage for length, mean over the batch"),
    Metric("left_out_share", "share", "of the batch, trajectories that `selection` leaves out of the loss"),
    Metric("malformed", "trajectories", "with an action that the environment calls malformed"),
    Metric("value_mean", "reward", "prediction of the value head, mean over the batch"),
    Metric("value_loss", "reward^2", "mean squared error of the value head, before its update on the batch"),
    Metric("effective_fraction", "share", "of the batch, trajectories trained with a nonzero advantage, gate included"),
    Metric("advantage_jump", "", "spread of advantages (in groups, where there are) / its median over 10 steps before"),
    Metric("loss_spike", "", "|loss| / its median over the 10 steps before"),
    Metric("success_drop", "share", "best mean of success over 10 steps so far, minus that of the last 10"),
    Metric("reward_drop", "reward", "the same of reward_mean"),
    Metric("curriculum_share_*", "share", "probability that the next task is of that class"),
    Metric("curriculum_success_*", "share", "success of that class, weighted towards recent prompts"),
    _sum("loss", "", "the policy loss of the step", "loss"),
    Metric("grad_norm", "", "gradient norm of the whole model, before clipping", TRAINER),
    Metric("learning_rate", "", "that the step was trained with", TRAINER),
)
_LENGTHS = (
    Metric("turns", "turns", "actions of an episode, mean"),
    Metric("trajectory_tokens", "tokens", "prompt, actions and observations, mean"),
    Metric("response_tokens", "tokens", "sampled by the policy, mean over trajectories"),
    Metric("new_tokens", "tokens", "of these, those that repeat nothing; with length_penalty.unit=new_tokens"),
    Metric("response_tokens_max", "tokens", "sampled by the policy, of the longest trajectory"),
    Metric("length_trend", "", "response_tokens of the last 10 steps / of the first 10"),
    Metric("action_token_share", "share", "of all tokens, those that the policy sampled"),
    Metric("repeated_token_share", "share", "of action tokens, those inside an n-gram that the trajectory has had"),
    Metric("unique_sample_share", "share", "of a group's trajectories, those whose actions differ; mean over groups"),
    Metric("group_distinct_answers", "answers", "different last actions in a group, mean over groups"),
    Metric("distinct_answers", "answers", "different last actions in the batch"),
)
_POLICY = (
    _mean("gate_acceptance", "share", "trajectories accepted by the trust-region gate", "admitted", "rows"),
    _mean("sequence_kl", "nats", "D: mean Bernoulli KL of sampler and trainer per trajectory", "sequence_kl", "rows"),
    # Rejected trajectories have no part in the mean ratio.
    _mean("ratio_mean", "", "trainer / sampler probability, tokens of the loss", "ratio", "admitted_tokens", _TOKENS),
    Metric("ratio_max", "", "the largest of these ratios", LARGEST),
    _mean("logprob_difference", "nats", "|trainer - sampler| per action token", "logprob_difference", _TOKENS),
    Metric("logprob_difference_max", "nats", "the largest of these differences", LARGEST),
    _mean("clip_fraction", "share", "action tokens whose ratio is clipped", "clipped_tokens", _TOKENS),
    _mean("kl", "nats", "KL to the reference policy, per action token", "kl", _TOKENS),
    Metric("sampled_entropy", "nats", "-log-prob of the sampled tokens, mean: estimates the sampler's entropy"),
    _mean("entropy", "nats", "of the policy, per action token", "entropy", _TOKENS),
    Metric("beta", "", "coefficient of the KL term"),
    Metric("kl_penalty", "reward", "subtracted from the rewards for the KL, mean over the batch"),
    Metric("reference_distance", "", "norm of (policy - reference) weights / norm of the policy's"),
    Metric("reference_logprob", "nats", "of the reference per action token"),
    Metric("reference_entropy", "nats", "of the reference per action token"),
    Metric("temperature", "", "sampling temperature, mean over the batch"),
    Metric("group_size", "trajectories", "G: rollouts of one prompt, mean over groups"),
    Metric(
        "tied_trajectories_saved",
        "trajectories",
        "of the batch's zero-variance groups, how many fewer than with the starting G; below 0: more",
    ),
    _sum("policy_tokens", "tokens", "action tokens of the step", "policy_tokens"),
    _sum("retained_tokens", "tokens", "of these, tokens that enter the loss", "retained_tokens"),
    _sum("extreme_tokens", "tokens", "of these, tokens with trainer and sampler over 20 nats apart", "extreme_tokens"),
    Metric("staleness_mean", "versions", "age of a trajectory's oldest token, mean over the batch"),
    Metric("staleness_max", "versions", "the largest of these ages"),
    Metric("staleness_*", "share", "trajectories of that age, from - to"),
)
_ROLLOUT = (
    Metric("episodes_*", "episodes", "ended in this step, by end reason"),
    Metric("episodes_in_flight", "episodes", "in flight when the batch was complete"),
    Metric("queue_depth", "trajectories", "finished and not in the batch, waiting for the trainer"),
    Metric("total_trajectories_*", "trajectories", "since the start of the run, as of the step before"),
    Metric("servers_lost", "servers", "removed from the pool in this step, its weight sync included", MACHINE),
    Metric("workers_lost", "workers", "rollout workers that ended, or were ended, before their episodes", MACHINE),
    Metric("episodes_restarted", "episodes", "begun anew, since they were lost with a worker", MACHINE),
    Metric("rollout_faults", "tries", "requests and weight syncs of this step that failed and were retried", MACHINE),
    Metric("rollout_faults_*", "tries", "the same by reason; `sync_*` are weight syncs", MACHINE),
    Metric(
        "weight_sync_logprob_difference",
        "nats",
        "|trainer - server| per token of the probe after the weight sync, mean; of the server furthest off",
        MACHINE,
    ),
    Metric("observations_truncated", "observations", "truncated at rollout.max_observation_tokens"),
    Metric("actions_truncated", "share", "of the actions, those that ran to rollout.max_tokens_per_turn"),
    Metric("actions_with_chat_tokens", "share", "of the actions, those that go on after a token of the chat template"),
    _sum("dropped_ratio_guard", "trajectories", "rejected for a token whose ratio exceeds ratio_guard", "guarded"),
    Metric("dropped_*", "trajectories", "left out of training, by reason"),
    Metric("truncated_*", "trajectories", "truncated, by reason"),
)
_BATCHING = (
    Metric("padding_share", "share", "of the tokens computed, those that are padding"),
    Metric("budget_use", "share", "of the token budget of all microbatches, what is used"),
    Metric("cost_imbalance", "", "costliest data-parallel rank / mean - 1"),
    Metric("microbatch_imbalance", "", "costliest microbatch / mean - 1"),
    Metric("microbatches", "microbatches", "per rank"),
    Metric("over_budget", "trajectories", "longer than the token budget, alone in their microbatch"),
)
_MACHINE = (
    Metric("step_seconds", "s", "the whole step", MACHINE),
    Metric("rollout_seconds", "s", "the trainer waited for the batch", MACHINE),
    Metric(
        "rollout_idle_seconds_during_training", "s", "idle while the trainer trained, mean over rollout slots", MACHINE
    ),
    Metric("rollout_idle_seconds", "s", "idle in all, a batch's stragglers included, mean over rollout slots", MACHINE),
    Metric("group_wait_seconds", "s", "a finished trajectory waits for the last rollout of its group, mean", MACHINE),
    Metric("train_seconds", "s", "forward, backward and optimizer", MACHINE),
    Metric("refit_seconds", "s", "weight sync: from the trainer to the sampler", MACHINE),
    Metric("evaluating_seconds", "s", "held-out evaluation, on the steps that evaluate", MACHINE),
    Metric("tokens_per_second", "tokens/s", "training throughput, prompts and observations included", MACHINE),
    Metric(
        "rollout_tokens_per_second",
        "tokens/s",
        "rollout throughput, sampled tokens; in mode sync over rollout_seconds",
        MACHINE,
    ),
    Metric("memory_peak_gib", "GiB", "peak of allocated tensors in this step; on a CPU the process's peak", MACHINE),
    Metric("memory_reserved_gib", "GiB", "peak reserved by the allocator in this step", MACHINE),
    Metric("memory_total_gib", "GiB", "of the device", MACHINE),
    Metric("recompute_active", "", "1 where activations are recomputed in the backward pass", TRAINER),
    Metric("flash_attention_active", "", "1 where a flash or fused attention kernel is used (GPU)", TRAINER),
    Metric(
        "memory_retries",
        "times",
        "allocator retries after emptying its cache (fragmentation), since the start",
        MACHINE,
    ),
    Metric("*_seconds", "s", "a wall-clock time", MACHINE),
    Metric("*_per_second", "1/s", "a rate over wall-clock time", MACHINE),
    Metric("memory_*", "", "a memory counter", MACHINE),
)
TABLE: tuple[Metric, ...] = (*_LEARNING, *_LENGTHS, *_POLICY, *_ROLLOUT, *_BATCHING, *_MACHINE)
_BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in TABLE}
RENAMED: Mapping[str, str] = {  # since 0.1.0
    "gradient_norm": "grad_norm",
    "selected_share": "effective_fraction",
    "rollouts_wait_seconds": "rollout_idle_seconds_during_training",
    "rollout_empty_seconds": "rollout_idle_seconds",
    "servers_fallen": "servers_lost",
    "recompute_in_force": "recompute_active",
    "flash_attention_in_force": "flash_attention_active",
}


def with_new_names(record: Mapping[str, Any]) -> dict[str, Any]:
    """A line of `metrics.jsonl`, whichever version wrote it, under the names of this one.

    >>> with_new_names({"step": 1, "gradient_norm": 0.5})
    {'step': 1, 'grad_norm': 0.5}
    """
    return {RENAMED.get(name, name): value for name, value in record.items()}


def find_metric(name: str) -> Metric | None:
    """The table's line for `name`: its own, else its family's; None for a plug-in's own metric.

    >>> find_metric("dropped_too_old").unit
    'trajectories'
    """
    if name in _BY_NAME:
        return _BY_NAME[name]
    for metric in TABLE:
        head, star, tail = metric.name.partition("*")
        if star and name.startswith(head) and name.endswith(tail):
            return metric
    return None


def from_machine(name: str) -> bool:
    """Whether a number reads the clock or the memory: what two runs of one seed may differ in."""
    metric = find_metric(name)
    return metric is not None and metric.source == MACHINE
