"""What a configuration says of rollouts -> the collector's parts, for a run and for whoever looks before one."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from nemo_flashrl.algorithms.schedules import FixedGroupSize, GroupSize, TemperatureSchedule
from nemo_flashrl.batching.planner import usable_context
from nemo_flashrl.config import RunConfig, settings_of
from nemo_flashrl.engines.base import Engine
from nemo_flashrl.engines.factory import make_remote
from nemo_flashrl.environments.guard import task_at, tasks_of
from nemo_flashrl.metrics.novelty import Novelty, load_novelty
from nemo_flashrl.plugins import load_function
from nemo_flashrl.records import Sampling, Trajectory
from nemo_flashrl.rollout.chat_tokens import Codec
from nemo_flashrl.rollout.curriculum import Curriculum, classes_of
from nemo_flashrl.rollout.episode import Limits
from nemo_flashrl.rollout.groups import LongPrompts
from nemo_flashrl.rollout.messages import Plan
from nemo_flashrl.rollout.player import evaluate, play_all
from nemo_flashrl.rollout.prompts import PromptGroupSizes, PromptSource, PromptStream
from nemo_flashrl.rollout.worker_pool import WorkerPool
from nemo_flashrl.weight_sync.hf_config import read_hf_json, refuse_lfs_pointer


def episode_limits(config: RunConfig) -> Limits:
    """What bounds an episode."""
    rollout = config.rollout
    return Limits(
        max_turns=rollout.max_turns,
        max_context=usable_context(config.model.context_length, config.batching.context_margin),
        max_observation_tokens=rollout.max_observation_tokens,
        step_timeout=rollout.step_timeout,
        episode_timeout=rollout.episode_timeout,
        keep_observation=rollout.keep_observation,
        summarize=load_function(rollout.summarizer) if rollout.summarizer else None,
        on_long_prompt=long_prompts(config),
    )


def long_prompts(config: RunConfig, tasks: str = "task") -> LongPrompts:
    """What becomes of prompts that leave no room for an answer."""
    length, batching = config.model.context_length, config.batching
    return LongPrompts(config.environment.name, length, batching.context_margin, batching.on_too_long, tasks)


def episode_sampling(config: RunConfig, tokenizer: Any) -> Sampling:
    """How an action is sampled at the start of a run; all end tokens that the model's files name end it."""
    rollout, schedule = config.rollout, temperature_schedule(config)
    tokens = stop_tokens(config, tokenizer)
    stops = {*tokens.values()}.union(*end_tokens(tokenizer, config.model.path).values())
    return Sampling(
        temperature=rollout.temperature if schedule is None else schedule(0),
        max_tokens=rollout.max_tokens_per_turn,
        stop_token_ids=tuple(sorted(stops)),
        stop=tuple(string for string in rollout.stop if string not in tokens),
    )


def stop_tokens(config: RunConfig, tokenizer: Any) -> dict[str, int]:
    """Those of `rollout.stop` that are one token, by their spelling; the others are looked for in the text."""
    ids = {text: tokenizer.convert_tokens_to_ids(text) for text in config.rollout.stop}
    return {text: index for text, index in ids.items() if index not in (None, tokenizer.unk_token_id)}


def end_tokens(tokenizer: Any, folder: str | Path) -> dict[str, set[int]]:
    """The tokens that end an answer, by where it is said; transformers' `generate` knows generation_config.json's.

    Raises:
        ValueError: a file of the folder is a Git LFS pointer, or is not JSON.
    """
    ends = {"the tokenizer": {tokenizer.eos_token_id} - {None}, "the chat template": set(Codec(tokenizer).turn_ends)}
    for name in ("config.json", "generation_config.json"):
        path = Path(folder) / name
        if not path.is_file():
            continue
        refuse_lfs_pointer(path)
        said = read_hf_json(path).get("eos_token_id")
        listed = said if isinstance(said, list) else [said]
        ends[name] = {index for index in listed if isinstance(index, int) and 0 <= index < len(tokenizer)}
    return ends


def temperature_schedule(config: RunConfig) -> TemperatureSchedule | None:
    """Policy version -> temperature; None where it stays."""
    points = config.rollout.temperature_schedule
    return TemperatureSchedule(points, config.trainer.steps) if points else None


def moving_group_size(config: RunConfig, group_size: int) -> FixedGroupSize | None:
    """What moves the group size from `group_size`; None where it stays."""
    moves, batch_size = config.group_size, config.rollout.batch_size
    for name in ("every", "max"):
        if getattr(moves, name) and group_size == 1:
            raise ValueError(f"group_size.{name}={getattr(moves, name)}: {config.algorithm.name} has no groups; set 0")
    if moves.every:
        return GroupSize(group_size, every=moves.every, threshold=moves.threshold, batch_size=batch_size)
    if moves.max:
        return PromptGroupSizes(group_size, lowest=moves.min, highest=moves.max, batch_size=batch_size)
    return None


def prompt_source(config: RunConfig, tasks: Sequence[Any]) -> PromptSource:
    """Epochs over all tasks, a fixed mixture of their classes, or a curriculum."""
    curriculum, seed = config.curriculum, config.trainer.seed
    adaptive = curriculum.mode == "adaptive"
    if not adaptive and not curriculum.mixture:
        return PromptStream(len(tasks), seed=seed)
    steps = round(curriculum.share * config.trainer.steps / config.rollout.updates_per_batch)  # batches
    return Curriculum(
        classes_of(tasks, curriculum.classes),
        seed=seed,
        adaptive_steps=steps if adaptive else 0,
        rule=curriculum.rule,
        threshold=curriculum.threshold,
        floor=curriculum.floor,
        mixture=curriculum.mixture,
    )


def novelty_of(config: RunConfig, tokenizer: Any) -> Novelty | None:
    """What measures which tokens are new; None where nothing asks, or n-grams do. Raises as `load_novelty`."""
    asked = config.length_penalty
    wanted = asked.coefficient > 0 and asked.unit == "new_tokens"
    return load_novelty(asked.novelty, asked.similarity, tokenizer, enough=asked.limit) if wanted else None


def held_out_tasks(config: RunConfig, environment: type) -> tuple[Any, list[Any]]:
    """Settings and tasks of `config.evaluation`.

    Raises:
        ValueError: the tasks are those that training draws from, or there are none.
    """
    asked = config.evaluation
    settings = settings_of(environment, {**config.environment.settings, **asked.settings}, "evaluation")
    if not asked.settings:
        raise ValueError(
            "evaluation.settings={}: name the environment's settings that make other tasks than those of training, "
            "another seed or path say"
        )
    try:
        all_tasks = tasks_of(environment, settings)  # a sequence; slices are not asked of it
        tasks = [task_at(all_tasks, index) for index in range(min(asked.tasks, len(all_tasks)))]
    except ValueError as error:
        raise ValueError(f"evaluation.settings={asked.settings}: {error}") from error
    return settings, tasks


def held_out_classes(config: RunConfig, environment: type) -> list[str]:
    """The class of each held-out task, by `curriculum.classes`; none where it is empty. Raises as `classes_of`."""
    name = config.curriculum.classes
    return classes_of(held_out_tasks(config, environment)[1], name) if name else []


def worker_count(config: RunConfig) -> int:
    """Rollout workers: as many as are asked for, else a quarter of this process's cores, from 1 to 16."""
    return config.rollout.workers or min(16, max(1, len(os.sched_getaffinity(0)) // 4))


def start_workers(config: RunConfig, tokenizer: Any, vocab_size: int) -> WorkerPool:
    """Rollout workers, which begin to load, and the engine whose servers they ask."""
    rollout, limits = config.rollout, episode_limits(config)
    adapter = rollout.weight_transfer == "adapter"
    return WorkerPool(
        make_remote(rollout, vocab_size, limits.max_context),
        Plan(config, tokenizer, vocab_size),
        worker_count(config),
        step_timeout=rollout.step_timeout,
        drain="always" if rollout.mode == "async" else "first" if adapter else "never",
        max_memory=rollout.worker_max_memory,
        long_prompts={False: long_prompts(config), True: long_prompts(config, "held-out task")},
    )


def held_out(config: RunConfig, environment: type, tokenizer: Any) -> Callable[[Engine], Awaitable[list[Trajectory]]]:
    """What plays the tasks of `config.evaluation` with an engine. Raises as `held_out_tasks`."""
    asked = config.evaluation
    settings, tasks = held_out_tasks(config, environment)
    sampling = replace(episode_sampling(config, tokenizer), temperature=asked.temperature)
    limits = replace(episode_limits(config), on_long_prompt=long_prompts(config, "held-out task"))

    async def play(engine: Engine) -> list[Trajectory]:
        slots = {"max_in_flight": config.rollout.slots, "samples": asked.samples}
        if isinstance(engine, WorkerPool):
            return await play_all(partial(engine.play, held_out=True), len(tasks), sampling, **slots)
        made = (lambda: environment(settings), tasks, tokenizer, limits, sampling)
        return await evaluate(engine, *made, **slots, seed=config.trainer.seed)

    return play
