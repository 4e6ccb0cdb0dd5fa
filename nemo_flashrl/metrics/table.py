"""Every number of `metrics.jsonl`: unit, meaning, and how it comes from microbatches, data-parallel ranks and stages.

Where a number comes from decides how it is reduced:

    batch    the collecting rank computes it once over the whole batch: nothing to reduce
    mean     `numerator` / the first of `denominators` that there is, both summed over microbatches and data-parallel
             ranks on the last pipeline stage, divided once, and sent from there to the rank that writes
    sum      as `mean`, without the division
    largest  the maximum over microbatches and data-parallel ranks, on the last pipeline stage
    machine  a clock, a memory counter, a count of accidents; memory is the maximum over all ranks, the others are the
             writing rank's
    trainer  the same on every rank after Megatron's own reduction
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    Metric("evaluation_environment_errors", "episodes", "on held-out tasks, ended by a fault of the environment"),
    Metric("evaluation_*", "", "on held-out tasks: mean reward, and the share of tasks that one of k samples solves"),
    Metric("reference_evaluation_*", "", "the same for the reference policy"),
    Metric("advantage_std", "reward", "of the advantages that weigh the loss, over the batch"),
    Metric("group_reward_std", "reward", "standard deviation of rewards inside a group, mean over groups"),
    Metric("group_advantage_std", "", "standard deviation of advantages inside a group, mean over groups"),
    Metric("tied_groups", "share", "groups whose rewards are all equal: no gradient comes from them"),
    Metric("effective_samples", "trajectories", "with an advantage and a weight that are not 0, before any gate"),
    Metric("advantage_clip_fraction", "share", "trajectories with an advantage that advantage.clip cut"),
    Metric("shaping", "reward", "added to the advantage, length penalty included, mean over the batch"),
    Metric("length_penalty", "reward", "taken off the advantage for length, mean over the batch"),
    Metric("malformed", "trajectories", "with an action that the environment calls none"),
    Metric("value_mean", "reward", "what the value head predicted, mean over the batch"),
    Metric("value_loss", "reward^2", "of the value head before it learnt from the batch: mean squared error"),
    Metric("selected_share", "share", "trajectories trained with an advantage other than 0"),
    Metric("advantage_jump", "", "spread of advantages (in groups, where there are) / its median over 10 steps before"),
    Metric("loss_spike", "", "|loss| / its median over the 10 steps before"),
    Metric("curriculum_share_*", "share", "how likely the next task is of that class"),
    Metric("curriculum_success_*", "share", "success of that class, recent prompts counting most"),
    _sum("loss", "", "the policy loss of the step", "loss"),
    Metric("gradient_norm", "", "of the whole model before clipping", TRAINER),
    Metric("learning_rate", "", "of the step", TRAINER),
)
_LENGTHS = (
    Metric("turns", "turns", "actions of an episode, mean"),
    Metric("trajectory_tokens", "tokens", "prompt, actions and observations, mean"),
    Metric("response_tokens", "tokens", "sampled by the policy, mean over trajectories"),
    Metric("response_tokens_max", "tokens", "sampled by the policy, of the longest trajectory"),
    Metric("length_trend", "", "response_tokens of the last 10 steps / of the first 10"),
    Metric("action_token_share", "share", "of all tokens, those that the policy sampled"),
    Metric("repeated_token_share", "share", "of action tokens, those inside an n-gram that the trajectory has had"),
    Metric("unique_sample_share", "share", "of a group's trajectories, those whose actions differ; mean over groups"),
    Metric("group_distinct_answers", "answers", "different last actions in a group, mean over groups"),
    Metric("distinct_answers", "answers", "different last actions in the batch"),
)
_POLICY = (
    _mean("gate_acceptance", "share", "trajectories that the trust region admits", "admitted", "rows"),
    _mean("sequence_kl", "nats", "D: mean Bernoulli KL of sampler and trainer per trajectory", "sequence_kl", "rows"),
    # Rejected trajectories have no part in the mean ratio.
    _mean("ratio_mean", "", "trainer / sampler probability, tokens of the loss", "ratio", "admitted_tokens", _TOKENS),
    Metric("ratio_max", "", "the largest of these ratios", LARGEST),
    _mean("logprob_difference", "nats", "|trainer - sampler| per action token", "logprob_difference", _TOKENS),
    Metric("logprob_difference_max", "nats", "the largest of these differences", LARGEST),
    _mean("clip_fraction", "share", "action tokens whose ratio is clipped", "clipped_tokens", _TOKENS),
    _mean("kl", "nats", "divergence from the reference policy per action token", "kl", _TOKENS),
    Metric("sampled_entropy", "nats", "-log-prob of the sampled tokens, mean: estimates the sampler's entropy"),
    _mean("entropy", "nats", "of the policy per action token", "entropy", _TOKENS),
    Metric("beta", "", "coefficient of the KL term"),
    Metric("kl_penalty", "reward", "taken off the rewards for the KL, mean over the batch"),
    Metric("reference_distance", "", "norm of (policy - reference) weights / norm of the policy's"),
    Metric("reference_logprob", "nats", "of the reference per action token"),
    Metric("reference_entropy", "nats", "of the reference per action token"),
    Metric("temperature", "", "that the sampler divided logits by, mean over the batch"),
    Metric("group_size", "trajectories", "G: rollouts of one prompt"),
    _sum("policy_tokens", "tokens", "action tokens of the step", "policy_tokens"),
    _sum("retained_tokens", "tokens", "of these, tokens that enter the loss", "retained_tokens"),
    _sum("extreme_tokens", "tokens", "of these, tokens with trainer and sampler over 20 nats apart", "extreme_tokens"),
    Metric("staleness_mean", "versions", "age of a trajectory's oldest token, mean over the batch"),
    Metric("staleness_max", "versions", "the largest of these ages"),
    Metric("staleness_*", "share", "trajectories of that age, from - to"),
)
_ROLLOUT = (
    Metric("episodes_*", "episodes", "ended in this step, by their end"),
    Metric("episodes_in_flight", "episodes", "running when the batch was complete"),
    Metric("queue_depth", "trajectories", "finished beside the batch, waiting for the trainer"),
    Metric("total_trajectories_*", "trajectories", "since the start of the run, as of the step before"),
    Metric("servers_fallen", "servers", "left out in this step, its weight sync included", MACHINE),
    Metric("rollout_faults", "tries", "requests and weight syncs of this step that failed and were repeated", MACHINE),
    Metric("rollout_faults_*", "tries", "the same by reason, where there were any; `sync_*` are weight syncs", MACHINE),
    Metric("observations_truncated", "observations", "cut at rollout.max_observation_tokens"),
    _sum("dropped_ratio_guard", "trajectories", "rejected for a token with a ratio beyond the guard", "guarded"),
    Metric("dropped_*", "trajectories", "left out of training, by reason"),
    Metric("truncated_*", "trajectories", "cut, by reason"),
)
_BATCHING = (
    Metric("padding_share", "share", "of the tokens run, those that stand for nothing"),
    Metric("budget_use", "share", "of the token budget of all microbatches"),
    Metric("cost_imbalance", "", "costliest data-parallel rank / mean - 1"),
    Metric("microbatch_imbalance", "", "costliest microbatch / mean - 1"),
    Metric("microbatches", "microbatches", "of each rank"),
    Metric("over_budget", "trajectories", "longer than the budget, alone in their microbatch"),
)
_MACHINE = (
    Metric("step_seconds", "s", "the whole step", MACHINE),
    Metric("rollout_seconds", "s", "waited for the batch", MACHINE),
    Metric("rollouts_wait_seconds", "s", "places for episodes empty while no batch was asked for, mean", MACHINE),
    Metric("rollout_empty_seconds", "s", "places for episodes empty, a batch's tail included, mean", MACHINE),
    Metric("group_wait_seconds", "s", "from a trajectory's end to that of its group's last rollout, mean", MACHINE),
    Metric("train_seconds", "s", "forward, backward and optimizer", MACHINE),
    Metric("refit_seconds", "s", "weights from the trainer to the sampler", MACHINE),
    Metric("tokens_per_second", "tokens/s", "trained, prompts and observations included", MACHINE),
    Metric("rollout_tokens_per_second", "tokens/s", "sampled; in mode sync while the step waited", MACHINE),
    Metric("memory_peak_gib", "GiB", "most that tensors held in this step; on a CPU the process's peak", MACHINE),
    Metric("memory_reserved_gib", "GiB", "most that the allocator held in this step", MACHINE),
    Metric("memory_total_gib", "GiB", "of the device", MACHINE),
    Metric("recompute_in_force", "", "1 where layers are computed again in the backward pass", TRAINER),
    Metric("flash_attention_in_force", "", "1 where attention runs without its matrix of scores (GPU)", TRAINER),
    Metric("memory_retries", "times", "the allocator emptied its cache to find a block, since the start", MACHINE),
    Metric("*_seconds", "s", "a reading of the clock", MACHINE),
    Metric("*_per_second", "1/s", "a reading of the clock", MACHINE),
    Metric("memory_*", "", "a reading of a memory counter", MACHINE),
)
TABLE: tuple[Metric, ...] = (*_LEARNING, *_LENGTHS, *_POLICY, *_ROLLOUT, *_BATCHING, *_MACHINE)
_BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in TABLE}


def find_metric(name: str) -> Metric | None:
    """The table's line for `name`: its own, else its family's; None for a name that only a plug-in knows.

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
