"""One episode: token ids in, token ids out; a trajectory is what the sampler saw and produced, never re-tokenised.

environment.reset -> prompt ids --> engine.generate -> action ids --> environment.step -> observation ids --+
                                        ^                                                                   |
                                        +-------------------------------------------------------------------+
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from nemo_flashrl.environments.environment import Environment, Message, StepResult
from nemo_flashrl.records import NO_VERSION, Sampling, Trajectory, Turn
from nemo_flashrl.rollout.codec import Codec
from nemo_flashrl.rollout.engine import Engine

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds an episode; `Sampling.max_tokens` bounds each of its actions."""

    max_turns: int = 8
    max_context: int = 4096  # tokens of prompt, actions and observations together
    max_observation_tokens: int = 1024  # of one tool answer; the rest is cut and counted
    step_timeout: float = 60.0  # seconds for one reset, step or close of the environment

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_context", "max_observation_tokens", "step_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"limits: {name}={getattr(self, name)} must be above 0")


@dataclass(slots=True)
class _Episode:
    """What has happened so far."""

    prompt: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    reward: float = 0.0
    success: bool | None = None  # the environment's word, where it has one
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def token_ids(self) -> list[int]:
        ids = list(self.prompt)
        for turn in self.turns:
            ids += [*turn.action.token_ids, *turn.observation_ids]
        return ids


class _EnvironmentFailure(Exception):
    """The environment raised, took too long, or answered with something that is no answer."""


async def run_episode(
    engine: Engine,
    environment: Environment,
    task: Any,
    codec: Codec,
    limits: Limits,
    sampling: Sampling,
    *,
    prompt_index: int = 0,
    sample: int = 0,
    seed: int = 0,
) -> Trajectory:
    """Play `task` to its end, and close the environment whatever happens.

    `sample` counts the episodes of one prompt; it, `seed`, `prompt_index` and the turn fix each request's randomness
    (`sampling.seed` is not used). A fault of the environment ends the episode with "environment_error", the reward so
    far and `info["error"]`.

    Raises:
        ValueError: the prompt leaves no room in `limits.max_context`.
        Whatever the engine raises.
    """
    episode, identity = _Episode(), (seed, prompt_index, sample)
    try:
        end_reason = await _play(engine, environment, task, codec, limits, sampling, episode, identity)
    except _EnvironmentFailure as failure:
        end_reason, episode.info["error"] = "environment_error", str(failure)
    finally:
        try:
            await _guarded("close", limits.step_timeout, environment.close)
        except _EnvironmentFailure as failure:
            episode.info["close_error"] = str(failure)
    return _trajectory(episode, end_reason, prompt_index)


def turn_seed(seed: int, prompt_index: int, sample: int, turn: int) -> int:
    """The seed of one request, in 0..2**63-1: a hash, so that neighbours share nothing."""
    words = np.random.SeedSequence([seed, prompt_index, sample, turn]).generate_state(1, np.uint64)
    return int(words[0]) >> 1


async def _play(
    engine: Engine,
    environment: Environment,
    task: Any,
    codec: Codec,
    limits: Limits,
    sampling: Sampling,
    episode: _Episode,
    identity: tuple[int, int, int],
) -> str:
    """Fill `episode` turn by turn; returns its end reason."""
    messages = await _guarded("reset", limits.step_timeout, _reset, environment, task)
    episode.prompt = codec.prompt_ids(messages)
    if len(episode.prompt) >= limits.max_context:
        raise ValueError(
            f"a prompt of {len(episode.prompt)} tokens leaves no room in max_context={limits.max_context}: "
            f"raise it or shorten the prompt"
        )
    for turn in range(limits.max_turns):
        token_ids = episode.token_ids
        room = limits.max_context - len(token_ids)
        request = replace(sampling, max_tokens=min(sampling.max_tokens, room), seed=turn_seed(*identity, turn))
        action = await engine.generate(token_ids, request)
        episode.turns.append(Turn(action))
        text = codec.action_text(action.token_ids, sampling.stop_token_ids)
        result = await _guarded("step", limits.step_timeout, _step, environment, text)
        episode.reward += result.reward
        episode.success = result.success
        episode.info.update(result.info)
        if result.done:
            return "done"
        if turn + 1 < limits.max_turns:
            observation = _encode(codec, result.observation, action.token_ids, limits, episode)
            if len(token_ids) + len(action.token_ids) + len(observation) >= limits.max_context:
                return "token_limit"
            episode.turns[-1] = Turn(action, tuple(observation))
    return "turn_limit"


async def _reset(environment: Environment, task: Any) -> list[Message]:
    messages = await environment.reset(task)
    if not messages or not all(isinstance(message["content"], str) for message in messages):
        raise TypeError("the prompt is no list of messages with a text each")
    return messages


async def _step(environment: Environment, action: str) -> StepResult:
    result = await environment.step(action)
    if not (isinstance(result, StepResult) and isinstance(result.observation, str) and isinstance(result.info, dict)):
        raise TypeError(f"the answer is a {type(result).__name__}, not a StepResult with a text and a dict")
    if not math.isfinite(result.reward):
        raise ValueError(f"the reward is {result.reward}")
    return result


async def _guarded(name: str, timeout: float, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """Await one call of the environment, which is not ours: whatever it raises ends this episode, not the run."""
    timer = asyncio.timeout(timeout)
    try:
        async with timer:
            return await function(*arguments)
    except asyncio.CancelledError as error:
        if asyncio.current_task().cancelling():  # it is the episode that is cancelled, from outside
            raise
        raise _EnvironmentFailure(f"{name}: cancelled itself") from error
    except Exception as error:
        late = isinstance(error, TimeoutError) and timer.expired()
        what = f"no answer in {timeout} s" if late else f"{type(error).__name__}: {error}"
        raise _EnvironmentFailure(f"{name}: {what}") from error


def _encode(
    codec: Codec, observation: str, action_ids: tuple[int, ...], limits: Limits, episode: _Episode
) -> list[int]:
    try:
        ids, cut = codec.observation_ids(observation, action_ids, limits.max_observation_tokens)
    except (TypeError, UnicodeError) as error:  # what is no text, like half a surrogate pair, cannot be encoded
        raise _EnvironmentFailure(f"step: the observation cannot be encoded: {error}") from error
    if cut:
        episode.info["observations_truncated"] = episode.info.get("observations_truncated", 0) + 1
    return ids


def _trajectory(episode: _Episode, end_reason: str, prompt_index: int) -> Trajectory:
    """Lay the turns out flat: the place where a token's mask, log-prob and version are born."""
    token_ids = list(episode.prompt)
    mask, logprobs, versions = [False] * len(token_ids), [0.0] * len(token_ids), [NO_VERSION] * len(token_ids)
    for turn in episode.turns:
        sampled, observed = len(turn.action.token_ids), len(turn.observation_ids)
        token_ids += [*turn.action.token_ids, *turn.observation_ids]
        mask += [True] * sampled + [False] * observed
        logprobs += [*turn.action.logprobs, *[0.0] * observed]
        versions += [*turn.action.versions, *[NO_VERSION] * observed]
    solved = episode.reward > 0 if episode.success is None else episode.success
    return Trajectory(
        prompt_index=prompt_index,
        group=prompt_index,
        token_ids=np.array(token_ids, dtype=np.int64),
        action_mask=np.array(mask, dtype=bool),
        behavior_logprobs=np.array(logprobs, dtype=np.float32),
        versions=np.array(versions, dtype=np.int32),
        reward=episode.reward,
        turns=len(episode.turns),
        end_reason=end_reason,
        failed=not solved,
        info=episode.info,
    )
