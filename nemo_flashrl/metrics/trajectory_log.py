"""A trajectory as a line of a table (`trajectories.jsonl`), and as text that a person reads (`samples.jsonl`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nemo_flashrl.metrics.repetition import new_tokens, repeated_token_share
from nemo_flashrl.records import Trajectory

PROMPT, ACTION, OBSERVATION = "prompt", "action", "observation"


def trajectory_row(trajectory: Trajectory, step: int, policy_version: int, advantage: float) -> dict[str, Any]:
    """The numbers of one trajectory that was trained on in `step`; a NaN advantage: it was left out.

    `pandas.read_json(file, lines=True)` makes a table of such lines.
    """
    return {
        "step": step,
        "prompt_index": trajectory.prompt_index,
        "group": trajectory.group,
        "reward": trajectory.reward,
        "advantage": advantage,
        "success": not trajectory.failed,
        "turns": trajectory.turns,
        "tokens": len(trajectory.token_ids),
        "action_tokens": trajectory.action_count,
        "end_reason": trajectory.end_reason,
        "repeated_token_share": round(repeated_token_share(trajectory), 4),
        **({} if trajectory.repeats is None else {"new_tokens": new_tokens(trajectory)}),
        "staleness": policy_version - trajectory.oldest_version,
        "shaping": trajectory.shaping,
        "malformed": trajectory.malformed,
        "info": trajectory.info,
    }


def readable(trajectory: Trajectory, tokenizer: Any, advantage: float | None = None) -> dict[str, Any]:
    """What was said, as `segments` and as one `text` with the sampled tokens in [brackets] and their advantage, if any.

    Every token of a segment of kind "action" has the segment's `advantage`; `logprob` is the sampler's mean over it.

        Q k 2 9 : [get ( k 2 9 ) | +0.42] > v 1 7 [answer ( v 1 7 ) | +0.42]
    """
    segments = []
    for start, end, sampled in _spans(trajectory):
        segment = {
            "kind": ACTION if sampled else OBSERVATION if segments else PROMPT,
            "text": tokenizer.decode(trajectory.token_ids[start:end].tolist()),
            "tokens": end - start,
        }
        if sampled:
            segment["advantage"] = advantage
            segment["logprob"] = round(float(trajectory.behavior_logprobs[start:end].mean()), 4)
        segments.append(segment)
    mark = "" if advantage is None else f" | {advantage:+.2f}"
    shown = [f"[{s['text']}{mark}]" if s["kind"] == ACTION else s["text"] for s in segments]
    return {"segments": segments, "text": " ".join(shown)}


def _spans(trajectory: Trajectory) -> Iterator[tuple[int, int, bool]]:
    """(start, end, sampled) of each run of tokens with one mask value."""
    mask, start = trajectory.action_mask, 0
    for end in range(1, len(mask) + 1):
        if end == len(mask) or mask[end] != mask[start]:
            yield start, end, bool(mask[start])
            start = end
