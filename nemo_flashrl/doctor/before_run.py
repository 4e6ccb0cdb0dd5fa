"""`flashrl doctor rewards` and `flashrl doctor groups`: what a configuration samples and how it scores it, unlearnt."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nemo_flashrl.config import RunConfig, load
from nemo_flashrl.doctor.reward_terms import as_table, findings, reward_terms
from nemo_flashrl.engines.factory import make_engine
from nemo_flashrl.metrics.monitors import FEW_UNIQUE
from nemo_flashrl.metrics.repetition import distinct_answers, unique_sample_share
from nemo_flashrl.metrics.step import group_metrics
from nemo_flashrl.metrics.trajectory_log import trajectory_row
from nemo_flashrl.preflight.prepare import Parts, prepare
from nemo_flashrl.records import Trajectory
from nemo_flashrl.rollout.from_config import episode_limits, episode_sampling, prompt_source
from nemo_flashrl.rollout.held_out import evaluate, pass_at_k
from nemo_flashrl.run.jsonl import read_json_lines
from nemo_flashrl.run.record import read_run

MOSTLY_TIED = 0.5


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


def look_at_groups(name: str, overrides: Sequence[str], *, prompts: int, samples: int | None) -> tuple[str, bool]:
    """(text, whether something is wrong) of how much the rollouts of one prompt differ."""
    with tempfile.TemporaryDirectory() as folder:
        config = load(name, [*overrides, f"output={Path(folder) / 'none'}"])
        parts = prepare(config, 1)
        count = samples or max(parts.algorithm.group_size, 2)
        trajectories = _sample(config, parts, prompts=prompts, samples=count)
    title = f"{count} rollouts of {len(trajectories) // count} prompts at temperature {trajectories[0].temperature:g}"
    return _text(title, group_table(trajectories, count), group_findings(trajectories))


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
    """Of the first prompts of the run, with the run's own sampling."""
    source = prompt_source(config, parts.tasks)
    tasks: list[Any] = [parts.tasks[source.next()[1]] for _ in range(min(prompts, len(parts.tasks)))]

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

    return asyncio.run(play())


def _text(title: str, table: str, found: list[str]) -> tuple[str, bool]:
    wrong = [f"{number}. {finding}" for number, finding in enumerate(found, 1)] or ["nothing found"]
    return "\n".join([title, "", table, "", *wrong]), bool(found)
