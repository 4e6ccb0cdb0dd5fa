"""A batch of trajectories -> what `advantages.py` makes advantages of: lengths, shaping, what is left out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_flashrl.algorithms.advantages import Credit, CreditRules, LengthPenalty, Outcomes
from nemo_flashrl.algorithms.algorithm import Algorithm
from nemo_flashrl.config import RunConfig
from nemo_flashrl.metrics.repetition import new_tokens
from nemo_flashrl.records import Trajectory

_OPENING = re.compile(r" {0,3}(`{3,})[^`]*$")
_CLOSING = re.compile(r" {0,3}(`{3,})\s*$")
LENGTHS = {
    "tokens": lambda trajectory: trajectory.action_count,
    "turns": lambda trajectory: trajectory.turns,
    "new_tokens": new_tokens,
}


@dataclass(frozen=True)
class TrajectoryCredit:
    """The techniques around an algorithm; as they are by default, none is on.

    >>> TrajectoryCredit(shaping={"politeness": 0.1}).outcomes([trajectory], [trajectory], step=0)[0].shaping
    tensor([0.1000])
    """

    rules: CreditRules = CreditRules()
    shaping: Mapping[str, float] = field(default_factory=dict)  # the environment's term -> its coefficient
    at_least: Mapping[str, float] = field(default_factory=dict)  # the environment's term -> what is below is left out
    length_penalty: LengthPenalty | None = None
    length_unit: str = "tokens"  # one of LENGTHS
    leave_out_malformed: bool = False
    code_mask: CodeMask | None = None

    def trained_tokens(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with the action mask that it is trained with."""
        return self.code_mask(trajectory) if self.code_mask else trajectory

    def outcomes(
        self, whole: Sequence[Trajectory], trained: Sequence[Trajectory], step: int
    ) -> tuple[Outcomes, dict[str, float]]:
        """What the batch came to, and its counts for the metrics.

        Args:
            whole: B trajectories as they were sampled; lengths are theirs.
            trained: the same after `trained_tokens`.
            step: optimizer steps done so far.

        Raises:
            ValueError: at step 0, a shaping term is asked for that no trajectory has.
        """
        if step == 0:
            self._check_terms(whole)
        terms = [t.shaping for t in whole]
        shaping = _column(sum(c * own.get(name, 0.0) for name, c in self.shaping.items()) for own in terms)
        metrics = {"malformed": float(sum(t.malformed for t in whole))}
        if self.length_penalty:
            lengths = torch.tensor([LENGTHS[self.length_unit](t) for t in whole])
            penalties = self.length_penalty(lengths, step)
            shaping = shaping - penalties
            metrics["length_penalty"] = float(penalties.mean())
            if self.length_unit == "new_tokens":
                metrics["new_tokens"] = float(lengths.float().mean())
        if self.shaping or self.length_penalty:
            metrics["shaping"] = float(shaping.mean())
        reasons: dict[str, list[bool]] = {}
        if self.leave_out_malformed:
            reasons["malformed"] = [t.malformed for t in whole]
        if self.at_least:
            reasons["shaping"] = [any(own.get(name, 0.0) < low for name, low in self.at_least.items()) for own in terms]
        if self.code_mask:
            reasons["no_code"] = [t.action_count == 0 for t in trained]
        left_out = torch.tensor(list(reasons.values()), dtype=torch.bool).view(-1, len(whole)).any(0)
        metrics |= {f"dropped_{reason}": float(sum(who)) for reason, who in reasons.items()}
        if reasons:
            metrics["left_out_share"] = float(left_out.float().mean())
        with_turns = self.rules.turn_coefficient > 0
        outcomes = Outcomes(
            rewards=_column(t.reward for t in whole),
            action_counts=torch.tensor([t.action_count for t in trained]),
            groups=torch.tensor([t.group for t in whole]),
            shaping=shaping,
            left_out=left_out,
            turn_rewards=[torch.tensor(t.turn_rewards, dtype=torch.float32) for t in whole] if with_turns else (),
        )
        return outcomes, metrics

    def _check_terms(self, whole: Sequence[Trajectory]) -> None:
        """A misspelt term would be 0 everywhere; an episode that the environment broke off tells nothing of it."""
        played = [t.shaping for t in whole if t.end_reason != "environment_error"]
        reported = sorted({name for own in played for name in own})
        for field_name, asked in (("advantage.shaping", self.shaping), ("selection.shaping_at_least", self.at_least)):
            for name, value in asked.items():
                if played and name not in reported:
                    raise ValueError(
                        f"{field_name}.{name}={value:g}: no episode of the first batch has this term; the environment "
                        f"reports {', '.join(reported) or 'none'} (StepResult.shaping)"
                    )

    def assign(self, algorithm: Algorithm, outcomes: Outcomes) -> tuple[Credit, dict[str, float]]:
        """What is trained on, and its numbers for the metrics."""
        credit = self.rules.assign(algorithm, outcomes)
        weightless = (credit.token_weights == 0) & ~outcomes.left_out
        turns = credit.turn_advantages or credit.advantages
        active = torch.tensor([bool((own != 0).any()) for own in turns]) & (credit.token_weights != 0)
        metrics = {
            "advantage_std": float(credit.advantages.std(unbiased=False)),
            "effective_samples": float(active.sum()),
            "dropped_by_algorithm": float(weightless.sum()),
        }
        if self.rules.clip is not None:
            metrics["advantage_clip_fraction"] = credit.clipped
        return credit, metrics


def trajectory_credit(config: RunConfig, tokenizer: Any) -> TrajectoryCredit:
    """The techniques that a configuration asks for."""
    advantage, length, selection = config.advantage, config.length_penalty, config.selection
    penalty = LengthPenalty(length.coefficient, length.limit, length.decay_steps)
    return TrajectoryCredit(
        rules=CreditRules(advantage.clip, advantage.turn_coefficient, advantage.turn_discount),
        shaping=advantage.shaping,
        at_least=selection.shaping_at_least,
        length_penalty=penalty if length.coefficient else None,
        length_unit=length.unit,
        leave_out_malformed=selection.malformed == "leave_out",
        code_mask=CodeMask(tokenizer) if selection.tokens == "code" else None,
    )


def token_advantages(trajectory: Trajectory, turn_advantages: Tensor) -> np.ndarray:
    """Each action token's, of its turn; float32 [S], 0 on other tokens."""
    turns = trajectory.turn_of_token
    return np.where(turns >= 0, turn_advantages.numpy()[np.maximum(turns, 0)], 0).astype(np.float32)


def _column(values: Any) -> Tensor:
    return torch.tensor([float(value) for value in values], dtype=torch.float32)


class CodeMask:
    r"""Keeps the action mask on fenced code alone; each turn begins outside of it, an open fence lasts to its end.

        tokens    Sure | , here: | \n``` | python\n | print | (1) | \n | ``` | \n Done
        code         .         .        .           .       x     x     x     .          .

    A token belongs to the code if one of its characters does; the fences do not. Tokens are decoded one by one: what is
    looked for (line breaks, back quotes, blanks) is ASCII, which no token shares with a piece of a multi-byte
    character, so that a character that is spread over tokens cannot shift anything.

    Args:
        tokenizer: has `decode` of a list of ids.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._piece: Callable[[int], str] = lru_cache(maxsize=None)(
            lambda token: tokenizer.decode([token], clean_up_tokenization_spaces=False)
        )

    def __call__(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with a smaller action mask, perhaps an empty one."""
        mask = np.zeros_like(trajectory.action_mask)
        for places in trajectory.turn_places:
            mask[places] = code_tokens([self._piece(int(token)) for token in trajectory.token_ids[places]])
        return replace(trajectory, action_mask=mask)


def code_tokens(pieces: list[str]) -> np.ndarray:
    """bool [A]: of the pieces of one text, those with a character inside fenced code.

    >>> code_tokens(["a\\n", "```\\n", "x", "\\n`", "``"]).tolist()
    [False, False, True, True, False]
    """
    owner = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
    inside = np.zeros(len(pieces), dtype=bool)
    start, fence = 0, 0  # characters before this line; back quotes of the open fence, 0 outside
    for line in re.findall(r"[^\n]*\n|[^\n]+", "".join(pieces)):  # splitlines would break at other characters too
        end = start + len(line)
        if fence:
            closing = _CLOSING.match(line)
            if closing and len(closing[1]) >= fence:
                fence = 0
            else:
                inside[owner[start:end]] = True
        elif opening := _OPENING.match(line):
            fence = len(opening[1])
        start = end
    return inside
