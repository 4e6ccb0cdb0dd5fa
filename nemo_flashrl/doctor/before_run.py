"""`flashrl doctor rewards` and `flashrl doctor groups`: what a configuration samples and how it scores it, unlearnt."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_flashrl.algorithms.advantages import LengthPenalty
from nemo_flashrl.config import RunConfig, load
from nemo_flashrl.engines.factory import make_engine
from nemo_flashrl.metrics.monitors import FEW_UNIQUE
from nemo_flashrl.metrics.repetition import distinct_answers, unique_sample_share
from nemo_flashrl.metrics.step import group_metrics
from nemo_flashrl.metrics.trajectory_log import readable, trajectory_row
from nemo_flashrl.preflight.prepare import Parts, prepare
from nemo_flashrl.records import Trajectory
from nemo_flashrl.rollout.from_config import episode_limits, episode_sampling
from nemo_flashrl.rollout.metrics import pass_at_k
from nemo_flashrl.rollout.player import evaluate
from nemo_flashrl.run.jsonl import read_json_lines
from nemo_flashrl.run.record import read_run

MOSTLY_TIED = 0.5
BLOCKS = " ▁▂▃▄▅▆▇█"
BINS = 12
LENGTH = "length in tokens"  # of the policy; a yardstick, no term
FOLLOWS_LENGTH = 0.5  # |correlation| from which a term pays for length
ROW_LENGTHS = {
    "tokens": lambda row: row["action_tokens"],
    "turns": lambda row: row["turns"],
    "new_tokens": lambda row: row.get("new_tokens", row["action_tokens"] * (1 - row["repeated_token_share"])),
}


def look_at_rewards(name: str, overrides: Sequence[str], *, samples: int, run: Path | None) -> tuple[str, bool]:
    """(text, whether something is wrong) of the reward's terms over the last `samples` of a run, or over new ones."""
    with tempfile.TemporaryDirectory() as folder:
        config = load(name, [*overrides, f"output={Path(folder) / 'none'}"])
        if run is None:
            trajectories = _sample(config, prepare(config, 1), prompts=samples, samples=1)
            rows = [trajectory_row(trajectory, 0, 0, 0.0) for trajectory in trajectories]
        else:
            rows = list(read_json_lines(read_run(run).trajectories))[-samples:]
    terms = reward_terms(rows, config)
    return _text(f"{len(rows)} samples of {run or 'the starting policy'}", as_table(terms), findings(terms))


def look_at_groups(
    name: str, overrides: Sequence[str], *, prompts: int, samples: int | None, show: int = 0
) -> tuple[str, bool]:
    """(text, whether something is wrong) of how much the rollouts of one prompt differ; `show` of them to be read."""
    with tempfile.TemporaryDirectory() as folder:
        config = load(name, [*overrides, f"output={Path(folder) / 'none'}"])
        parts = prepare(config, 1)
        count = samples or max(parts.algorithm.group_size, 2)
        trajectories = _sample(config, parts, prompts=prompts, samples=count)
    title = f"{count} rollouts of {len(trajectories) // count} prompts at temperature {trajectories[0].temperature:g}"
    table = group_table(trajectories, count)
    if show:
        table += "\n\n" + shown_texts(trajectories[:show], parts.tokenizer)
    return _text(title, table, group_findings(trajectories))


def shown_texts(trajectories: Sequence[Trajectory], tokenizer: Any) -> str:
    """Each rollout under a line of its numbers, its sampled tokens in [brackets]."""
    parts = []
    for number, trajectory in enumerate(trajectories, 1):
        outcome = "not solved" if trajectory.failed else "solved"
        said = readable(trajectory, tokenizer)["text"]
        parts.append(
            f"--- {number}: prompt {trajectory.prompt_index}, reward {trajectory.reward:g}, {outcome}, "
            f"{trajectory.action_count} tokens sampled in {trajectory.turns} turns, "
            f"end: {trajectory.end_reason}\n{said}"
        )
    return "\n\n".join(parts)


def group_table(trajectories: Sequence[Trajectory], count: int) -> str:
    """One line a prompt, of `count` trajectories each, and one for all."""
    lines = ["prompt   success   reward mean    std   unique   distinct answers"]
    for start in range(0, len(trajectories), count):
        group = trajectories[start : start + count]
        rewards = np.array([t.reward for t in group])
        success = float(np.mean([not t.failed for t in group]))
        lines.append(
            f"{group[0].prompt_index:>6}   {success:>7.2f}   {rewards.mean():>11.3g}  {rewards.std():>5.2f}   "
            f"{unique_sample_share(group):>6.2f}   {distinct_answers(group):>7} of {count}"
        )
    means = group_metrics(trajectories, [0.0] * len(trajectories))
    passes = " ".join(f"pass@{k} {pass_at_k(trajectories, k):.2f}" for k in sorted({1, count}))
    lines.append(
        f"all: {passes}; tied groups {means['tied_groups']:.2f}, std in a group {means['group_reward_std']:.2f}, "
        f"unique {means['unique_sample_share']:.2f}, distinct answers {means['group_distinct_answers']:.1f}"
    )
    return "\n".join(lines)


def group_findings(trajectories: Sequence[Trajectory]) -> list[str]:
    """What should be changed before a run."""
    means, found = group_metrics(trajectories, [0.0] * len(trajectories)), []
    if means["unique_sample_share"] < FEW_UNIQUE:
        found.append(
            f"{means['unique_sample_share']:.0%} of a group's rollouts are unique (under {FEW_UNIQUE:.0%}): "
            "rollout.temperature up, or fewer rollouts a prompt"
        )
    if means["tied_groups"] > MOSTLY_TIED:
        solved = np.mean([not t.failed for t in trajectories]) > 0.5
        found.append(
            f"{means['tied_groups']:.0%} of the groups have zero reward variance and give no gradient: "
            + ("harder tasks" if solved else "easier tasks or a warm start, or more rollouts a prompt")
        )
    return found


def _sample(config: RunConfig, parts: Parts, *, prompts: int, samples: int) -> list[Trajectory]:
    """Of the first prompts of the run, over as many epochs as they are, with the run's own sampling."""
    tasks: list[Any] = [parts.tasks[parts.prompts.next()[1]] for _ in range(prompts)]

    async def play() -> list[Trajectory]:
        limits = episode_limits(config)
        engine = make_engine(config.rollout, config.model.path, parts.vocab_size, limits.max_context)
        try:
            return await evaluate(
                engine,
                lambda: parts.environment(parts.environment_settings),
                tasks,
                parts.tokenizer,
                limits,
                episode_sampling(config, parts.tokenizer),
                max_in_flight=config.rollout.slots,
                samples=samples,
                seed=config.trainer.seed,
            )
        finally:
            await engine.close()

    trajectories = asyncio.run(play())
    return [parts.novelty.measured(t) for t in trajectories] if parts.novelty else trajectories


def _text(title: str, table: str, found: list[str]) -> tuple[str, bool]:
    wrong = [f"{number}. {finding}" for number, finding in enumerate(found, 1)] or ["nothing found"]
    return "\n".join([title, "", table, "", *wrong]), bool(found)


def reward_terms(rows: Sequence[Mapping[str, Any]], config: RunConfig) -> dict[str, np.ndarray]:
    """Term -> float64 [samples], as it counts in the first step, from lines of `trajectories.jsonl`.

    The environment's terms that the configuration gives no coefficient are there as they are, marked "not used".
    """
    given, penalty = config.advantage.shaping, config.length_penalty
    terms = {"reward": np.array([row["reward"] for row in rows], dtype=np.float64)}
    for name in sorted({name for row in rows for name in row.get("shaping") or {}} | set(given)):
        values = np.array([(row.get("shaping") or {}).get(name, 0.0) for row in rows], dtype=np.float64)
        title = f"shaping.{name}" if name in given else f"shaping.{name} (not used)"
        terms[title] = values * given.get(name, 1.0)
    if penalty.coefficient > 0:
        lengths = torch.tensor([float(ROW_LENGTHS[penalty.unit](row)) for row in rows])
        terms["length penalty"] = -LengthPenalty(penalty.coefficient, penalty.limit)(lengths, 0).double().numpy()
    terms[LENGTH] = np.array([row["action_tokens"] for row in rows], dtype=np.float64)
    return terms


@dataclass(frozen=True)
class TermSummary:
    """One term over the samples."""

    name: str
    mean: float
    std: float
    lowest: float
    median: float
    highest: float
    outliers: tuple[int, ...]  # places of samples, the farthest first
    with_length: float  # Pearson correlation with the sampled tokens; NaN where one of the two does not vary
    histogram: str


def summarize(name: str, values: np.ndarray, lengths: np.ndarray) -> TermSummary:
    """What a person looks at."""
    varies = values.std() > 0 and lengths.std() > 0
    counts, _ = np.histogram(values, bins=BINS)
    heights = np.ceil(counts / counts.max() * (len(BLOCKS) - 1)).astype(int)
    return TermSummary(
        name=name,
        mean=float(values.mean()),
        std=float(values.std()),
        lowest=float(values.min()),
        median=float(np.median(values)),
        highest=float(values.max()),
        outliers=tuple(outliers(values)),
        with_length=float(np.corrcoef(values, lengths)[0, 1]) if varies else float("nan"),
        histogram="".join(BLOCKS[height] for height in heights),
    )


def outliers(values: np.ndarray) -> list[int]:
    """Places that lie more than 3 interquartile ranges outside the quartiles (Tukey's "far out"), the farthest first.

    Where the quartiles are equal, more than 10 mean absolute deviations from the median: a tenth of ones among zeros is
    no outlier, one 100 among twenty zeros is.
    """
    first, middle, third = np.quantile(values, [0.25, 0.5, 0.75])
    if third > first:
        reach, distance = 3 * (third - first), np.maximum(values - third, first - values)
    else:
        reach, distance = 10 * np.abs(values - middle).mean(), np.abs(values - middle)
    far = np.flatnonzero(distance > reach)
    return far[np.argsort(-distance[far], kind="stable")].tolist()


def findings(terms: Mapping[str, np.ndarray]) -> list[str]:
    """What should be changed before a run."""
    lengths, found = terms[LENGTH], []
    reward = terms["reward"]
    if reward.std() == 0:
        found.append(f"reward is {reward[0]:g} on every sample: every advantage is 0, no gradient")
    for name, values in terms.items():
        if name == LENGTH or name.endswith("(not used)"):
            continue
        own = summarize(name, values, lengths)
        if abs(own.with_length) > FOLLOWS_LENGTH and name != "length penalty":
            found.append(f"{name} correlates with length by {own.with_length:+.2f}: it rewards length, not the task")
        if name != "reward" and own.std > reward.std() > 0:
            found.append(f"{name} varies more than the reward ({own.std:.3g} against {reward.std():.3g}): it dominates")
        if own.outliers:
            worst = own.outliers[0]
            found.append(
                f"{name} has {len(own.outliers)} outlier(s), the largest {values[worst]:g} at sample {worst}, with a "
                f"median of {own.median:g}: clip it, or algorithm.settings.normalisation=quantile"
            )
    return found


def as_table(terms: Mapping[str, np.ndarray]) -> str:
    """One line a term."""
    width = max(map(len, terms))
    head = f"{'term':<{width}}  {'mean':>9} {'std':>9} {'min':>9} {'median':>9} {'max':>9}  outliers  with length"
    lines = [f"{head}  from min to max"]
    for name, values in terms.items():
        own = summarize(name, values, terms[LENGTH])
        numbers = " ".join(f"{v:>9.4g}" for v in (own.mean, own.std, own.lowest, own.median, own.highest))
        correlation = "-" if np.isnan(own.with_length) else f"{own.with_length:+.2f}"
        lines.append(f"{name:<{width}}  {numbers}  {len(own.outliers):>8}  {correlation:>11}  |{own.histogram}|")
    return "\n".join(lines)
