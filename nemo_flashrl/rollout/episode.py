"""One episode: token ids in, token ids out; a trajectory is what the sampler saw and produced, never re-tokenised.

environment.reset -> prompt ids --> engine.generate -> action ids --> environment.step -> observation ids --+
                                        ^                                                                   |
                                        +-------------------------------------------------------------------+
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nemo_flashrl.engines.base import Context, Engine, until_stop
from nemo_flashrl.environments.environment import Environment, StepResult
from nemo_flashrl.environments.guard import EnvironmentFailure, ask, in_words, reset, step
from nemo_flashrl.records import NO_VERSION, Generation, Sampling, Trajectory, Turn
from nemo_flashrl.rollout.chat_tokens import Codec, Conversation, Observation

Summarize = Callable[[str, int], Awaitable[str]]  # (observation, tokens it may have) -> what stands in its place
KEEP = ("head", "tail", "both")
COUNTS = (  # ours, in the info
    *("observations_truncated", "observation_characters_cut", "observations_summarized"),
    *("actions_truncated", "actions_with_chat_tokens"),
)
PROMPT_TOO_LONG = "prompt_too_long"  # the end of an episode that has not begun


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds an episode; `Sampling.max_tokens` bounds each of its actions."""

    max_turns: int = 8
    max_context: int = 4096  # tokens of prompt, actions and observations together, in one segment
    max_observation_tokens: int = 1024  # of one tool answer; the rest is cut, counted, and marked in the text
    step_timeout: float = 60.0  # seconds for one reset, step or close of the environment
    episode_timeout: float | None = None  # seconds for the whole episode, generation included
    keep_observation: str = "head"  # what stays of a longer answer: "head" | "tail" | "both", half of each
    summarize: Summarize | None = None  # asked for a shorter text before anything is cut
    on_long_prompt: Callable[[int, int], None] | None = None  # told (task index, tokens) of one that leaves no room

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_context", "max_observation_tokens", "step_timeout", "episode_timeout"):
            value = getattr(self, name)
            if not (value is None or value > 0):
                raise ValueError(f"limits: {name}={value} must be above 0")
        if self.keep_observation not in KEEP:
            raise ValueError(f"limits: keep_observation={self.keep_observation!r} must be one of {', '.join(KEEP)}")


@dataclass(slots=True)
class _Episode:
    """What has happened so far."""

    conversation: Conversation = field(default_factory=Conversation)
    prompt: list[int] = field(default_factory=list)
    context: Context = field(default_factory=Context)  # what the policy sees now: the ids of the last segment
    turns: list[Turn] = field(default_factory=list)
    reward: float = 0.0
    success: bool | None = None  # the environment's word, where it has one
    info: dict[str, Any] = field(default_factory=dict)  # the environment's
    shaping: Counter[str] = field(default_factory=Counter)
    malformed: bool = False
    turn_rewards: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)  # ours


async def run_episode(
    engine: Engine,
    environment: Environment,
    task: Any,
    codec: Codec,
    limits: Limits,
    sampling: Sampling,
    *,
    task_index: int = 0,
    prompt_index: int = 0,
    sample: int = 0,
    seed: int = 0,
) -> Trajectory:
    """Play `task` to its end, and close the environment whatever happens.

    `sample` counts the episodes of one prompt; it, `seed`, `prompt_index` and the turn fix each request's randomness
    (`sampling.seed` is not used). A fault of the environment ends the episode with "environment_error", the reward so
    far and `info["error"]`; `limits.episode_timeout` with "time_limit" and the turns that were complete; a
    prompt that leaves no room in `limits.max_context` with "prompt_too_long" and no turn.

    Raises:
        Whatever the engine or `limits.on_long_prompt` raises.
    """
    episode, identity = _Episode(), (seed, prompt_index, sample)
    timer = asyncio.timeout(limits.episode_timeout)
    try:
        async with timer:
            end_reason = await _play(engine, environment, task, codec, limits, sampling, episode, identity)
    except EnvironmentFailure as failure:
        end_reason, episode.info["error"] = "environment_error", str(failure)
    except TimeoutError:
        if not timer.expired():  # the engine's own
            raise
        end_reason = "time_limit"
    finally:
        try:
            await ask("close", limits.step_timeout, environment.close)
        except EnvironmentFailure as failure:
            episode.info["close_error"] = str(failure)
    if end_reason == PROMPT_TOO_LONG and limits.on_long_prompt is not None:
        limits.on_long_prompt(task_index, len(episode.prompt))
    return _trajectory(episode, end_reason, prompt_index, sampling.temperature)


def unplayed(prompt_index: int, temperature: float, why: str) -> Trajectory:
    """The trajectory of an episode that nobody could play: a fault of its environment, with no turn."""
    return Trajectory(
        prompt_index=prompt_index,
        group=prompt_index,
        token_ids=np.zeros(0, dtype=np.int64),
        action_mask=np.zeros(0, dtype=bool),
        behavior_logprobs=np.zeros(0, dtype=np.float32),
        versions=np.zeros(0, dtype=np.int32),
        reward=0.0,
        turns=0,
        end_reason="environment_error",
        failed=True,
        info={"error": why},
        turn_of_token=np.zeros(0, dtype=np.int32),
        temperature=temperature,
    )


def _hash_constants() -> Iterator[tuple[int, int]]:
    """Of the 16 words that NumPy's SeedSequence hashes to mix four numbers, and of the two that it then gives."""
    for constant, factor, count in ((0x43B0D7E5, 0x931E8875, 16), (0x8B51F9DD, 0x58F38DED, 2)):
        for _ in range(count):
            following = constant * factor & _WORD
            yield constant, following
            constant = following


_WORD = 2**32 - 1
_HASHES = tuple(_hash_constants())


def turn_seed(seed: int, prompt_index: int, sample: int, turn: int) -> int:
    """The seed of one request, in 0..2**63-1: a hash, so that neighbours share nothing."""
    numbers = [seed, prompt_index, sample, turn]
    if min(numbers) < 0 or max(numbers) > _WORD:
        return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) >> 1
    # The same in plain integers, at a quarter of the time: NumPy promises that its algorithm stays.
    hashes = iter(_HASHES)

    def hashed(word: int) -> int:
        before, after = next(hashes)
        word = (word ^ before) * after & _WORD
        return word ^ word >> 16

    pool = [hashed(number) for number in numbers]
    for source, target in itertools.permutations(range(4), 2):
        word = (0xCA01F9DD * pool[target] - 0x4973F715 * hashed(pool[source])) & _WORD
        pool[target] = word ^ word >> 16
    return (hashed(pool[0]) | hashed(pool[1]) << 32) >> 1


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
    messages = await ask("reset", limits.step_timeout, reset, environment, task)
    episode.conversation = _encoded("reset", codec.begin, messages)
    episode.prompt = _encoded("reset", codec.prompt_ids, episode.conversation)
    episode.context = Context(episode.prompt)
    if len(episode.prompt) >= limits.max_context:
        episode.info["error"] = (
            f"reset: a prompt of {len(episode.prompt)} tokens leaves no room for an answer in {limits.max_context}"
        )
        return PROMPT_TOO_LONG
    for number in range(limits.max_turns):
        context = episode.context
        room = limits.max_context - len(context)
        most, seed = min(sampling.max_tokens, room), turn_seed(*identity, number)
        request = replace(sampling, max_tokens=most, seed=seed, decode=codec.decode)
        action = until_stop(codec.decode, await engine.generate(context, request), sampling.stop)
        episode.turns.append(Turn(action))
        _count_odd_ends(codec, action, episode.counts)
        text = codec.action_text(action.token_ids, sampling.stop_token_ids)
        result = await ask("step", limits.step_timeout, step, environment, text)
        episode.reward += result.reward
        episode.success = result.success
        episode.info.update(result.info)
        episode.shaping.update(result.shaping)
        episode.malformed |= result.malformed
        episode.turn_rewards.append(result.reward + result.process_reward)
        if result.done:
            return "done"
        if number + 1 < limits.max_turns:
            turn = await _observe(codec, episode, text, result, limits, sampling.stop_token_ids)
            if turn.starts_segment:
                episode.context = Context(turn.observation_ids)
            else:
                context += action.token_ids
                context += turn.observation_ids
            if len(episode.context) >= limits.max_context:
                return "token_limit"
            episode.turns[-1] = turn
    return "turn_limit"


def _count_odd_ends(codec: Codec, action: Generation, counts: Counter[str]) -> None:
    """What a policy does whose end token is not among those that stop it."""
    if action.finish_reason == "length":
        counts["actions_truncated"] += 1
    if codec.holds_chat_tokens(action.token_ids):
        counts["actions_with_chat_tokens"] += 1


async def _observe(
    codec: Codec, episode: _Episode, said: str, result: StepResult, limits: Limits, stops: Sequence[int]
) -> Turn:
    """The last turn with what the policy sees next, which `episode.conversation` then shows too."""
    action = episode.turns[-1].action
    seen = await _shortened(codec, result.observation, limits, episode.counts)
    shown = seen, result.role
    ids, new_segment = _encoded("step", codec.next_ids, episode.conversation, said, action.token_ids, *shown, stops)
    return Turn(action, tuple(ids), new_segment)


async def _shortened(codec: Codec, text: str, limits: Limits, counts: Counter[str]) -> Observation:
    size, keep = limits.max_observation_tokens, limits.keep_observation
    seen = codec.observation(text, size, keep)
    if not seen.removed:
        return seen
    if limits.summarize is not None:
        counts["observations_summarized"] += 1
        summary = await ask("summarize", limits.step_timeout, limits.summarize, text, size)
        if not isinstance(summary, str):
            raise EnvironmentFailure(f"summarize: the answer is a {type(summary).__name__}, not a string")
        seen = codec.observation(f"[summary of {len(text)} characters]\n{summary}", size, keep)
    counts["observations_truncated"] += bool(seen.removed)
    counts["observation_characters_cut"] += seen.removed
    return seen


def _encoded(where: str, encode: Callable[..., Any], *arguments: Any) -> Any:
    """What a chat template refuses, say a role, is the environment's fault."""
    try:
        return encode(*arguments)
    except ValueError as error:  # the codec's own word
        raise EnvironmentFailure(f"{where}: {error}") from error
    except Exception as error:  # of a template that meets a message it was not written for
        raise EnvironmentFailure(f"{where}: {in_words(error)}") from error


def _trajectory(episode: _Episode, end_reason: str, prompt_index: int, temperature: float) -> Trajectory:
    """Lay the turns out flat: the place where a token's mask, log-prob and version are born."""
    token_ids, starts, places = list(episode.prompt), [0], []
    for turn in episode.turns:
        places.append(slice(len(token_ids), len(token_ids) + len(turn.action.token_ids)))
        if turn.starts_segment:
            starts.append(places[-1].stop)
        token_ids += [*turn.action.token_ids, *turn.observation_ids]
    mask, logprobs = np.zeros(len(token_ids), dtype=bool), np.zeros(len(token_ids), dtype=np.float32)
    versions, turns = np.full(len(token_ids), NO_VERSION, dtype=np.int32), np.full(len(token_ids), -1, dtype=np.int32)
    for number, (turn, place) in enumerate(zip(episode.turns, places, strict=True)):
        mask[place], turns[place] = True, number
        logprobs[place], versions[place] = turn.action.logprobs, turn.action.versions
    info = {name: value for name, value in episode.info.items() if name not in COUNTS} | episode.counts
    solved = episode.reward > 0 if episode.success is None else episode.success
    return Trajectory(
        prompt_index=prompt_index,
        group=prompt_index,
        token_ids=np.array(token_ids, dtype=np.int64),
        action_mask=mask,
        behavior_logprobs=logprobs,
        versions=versions,
        reward=episode.reward,
        turns=len(episode.turns),
        end_reason=end_reason,
        failed=not solved,
        info=info,
        segment_starts=tuple(starts),
        shaping=dict(episode.shaping),
        malformed=episode.malformed,
        turn_rewards=(*episode.turn_rewards, *[0.0] * (len(episode.turns) - len(episode.turn_rewards))),
        turn_of_token=turns,
        temperature=temperature,
    )
