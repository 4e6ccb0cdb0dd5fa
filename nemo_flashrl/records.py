"""What flows through a run: a sampler's answer, a turn, a trajectory, a batch.

Shapes: S = tokens of one trajectory, A = action tokens of one turn, O = observation tokens of one turn,
B = trajectories of one batch. Log-probs are natural logarithms, aligned to the token that they score.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

NO_VERSION = -1  # the policy version of a token that no policy sampled


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an engine samples: the distribution is softmax(logits / temperature), never truncated."""

    temperature: float = 1.0  # 0 means greedy
    max_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()  # strings that end an answer with the token that completes one in its text
    decode: Callable[[Sequence[int]], str] | None = field(default=None, compare=False)  # an episode's, for `stop`
    seed: int = 0  # fixes this one request's randomness, whatever else is in flight


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer of an engine; the sampled stop token is included, with its log-prob."""

    token_ids: tuple[int, ...]  # [A]
    logprobs: tuple[float, ...]  # [A], of the distribution that was sampled from (temperature applied)
    versions: tuple[int, ...]  # [A], the policy version that sampled each token
    finish_reason: str  # "stop" | "length"


@dataclass(frozen=True, slots=True)
class Turn:
    """One action and what the environment answered; an episode's last turn has no observation."""

    action: Generation
    observation_ids: tuple[int, ...] = ()  # [O]
    starts_segment: bool = False  # True: the observation is a whole new prompt, in place of all that came before


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One whole episode: the prompt, then turns of (action tokens, observation tokens).

    Where the chat template changes what the policy saw earlier, a new segment begins with a prompt of its own; token t
    of a segment was sampled given the tokens of that segment before it, and no others. Reward, group and gate are the
    trajectory's.
    """

    prompt_index: int  # position in the prompt stream, counted over epochs: unique in a run
    group: int  # trajectories of one prompt share it (GRPO); equal to prompt_index otherwise
    token_ids: np.ndarray  # int64 [S]
    action_mask: np.ndarray  # bool [S], True only where the policy sampled the token
    behavior_logprobs: np.ndarray  # float32 [S], the sampler's; 0 where action_mask is False
    versions: np.ndarray  # int32 [S], NO_VERSION where action_mask is False
    reward: float
    turns: int
    end_reason: str  # "done" | "turn_limit" | "token_limit" | "environment_error" | ...
    failed: bool  # the environment's word that the task was not solved; not the sign of an advantage
    info: dict[str, Any] = field(default_factory=dict)  # what the environment wants in the trajectory log
    segment_starts: tuple[int, ...] = (0,)  # ascending places in 0..S-1, the first 0
    shaping: dict[str, float] = field(default_factory=dict)  # the environment's further terms, no part of the reward
    malformed: bool = False  # the environment's word that an action was none
    turn_rewards: tuple[float, ...] = ()  # [turns], of each step, process rewards included
    turn_of_token: np.ndarray | None = None  # int32 [S], the turn of each action token; -1 elsewhere
    temperature: float | None = None  # that every action token was sampled at; None: the run's only one
    repeats: np.ndarray | None = None  # bool [S], action tokens that say nothing new, see metrics/novelty.py

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.action_mask), len(self.behavior_logprobs), len(self.versions)}
        lengths |= {len(values) for values in (self.turn_of_token, self.repeats) if values is not None}
        assert len(lengths) == 1, f"per-token fields disagree in length: {sorted(lengths)}"

    @property
    def action_count(self) -> int:
        return int(np.count_nonzero(self.action_mask))

    @property
    def turn_places(self) -> list[np.ndarray]:
        """The places of each turn's action tokens."""
        places = np.flatnonzero(self.action_mask)
        if self.turn_of_token is None:  # a gap ends a turn
            return np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
        return np.split(places, np.flatnonzero(np.diff(self.turn_of_token[places])) + 1)

    @property
    def segments(self) -> tuple[slice, ...]:
        """Where each segment lies in the per-token fields; one of no tokens has one empty segment."""
        ends = (*self.segment_starts[1:], len(self.token_ids))
        return tuple(slice(begin, end) for begin, end in zip(self.segment_starts, ends, strict=True))

    @property
    def oldest_version(self) -> int:
        """The oldest policy version among the sampled tokens."""
        return int(self.versions[self.action_mask].min()) if self.action_count else NO_VERSION


@dataclass(frozen=True, slots=True)
class Batch:
    """What one optimizer step is made of; B = len(trajectories)."""

    trajectories: tuple[Trajectory, ...]
    policy_version: int  # the trainer's version that will train on it
    metrics: dict[str, float] = field(default_factory=dict)  # the collector's: waits, drops by reason, tokens/s
