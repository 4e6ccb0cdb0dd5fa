"""One microbatch of trajectories -> tensors, and the one place where tokens are shifted against their predictions.

Legend: R = trajectories of the microbatch, G = their segments, S = row length, N = tokens of a packed row; both are
multiples of `multiple`.

A trajectory's log-prob[t] scores token t given the tokens before it. A model's output at position t predicts token t +
1. So everything that is compared with an output is moved one to the left here and is from then on aligned to the
predicting position: `targets[t] = token[t + 1]`, and `target_mask` and `behavior_logprobs` with it. The last position
of a segment predicts nothing and is masked.

A trajectory of several segments is laid out like several trajectories, but for `row_index`: advantage, weight and gate
are looked up by it, so they stay the trajectory's.

Example, a prompt of two tokens and two sampled ones, multiple 4:

    token_ids          7   8   5   2
    action_mask        .   .   x   x
    logprobs           .   .  -1  -3
    targets            8   5   2   0
    target_mask        .   x   x   .
    behavior_logprobs  0  -1  -3   0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from nemo_flashrl.records import Trajectory

PAD_TOKEN = 0  # any valid id: causal attention keeps it from real tokens, and the mask from the loss


def truncate(trajectory: Trajectory, length: int) -> Trajectory:
    """The first `length` tokens of each segment; the trajectory itself if none has more. Reward and end reason stay."""
    kept = [np.arange(part.start, min(part.stop, part.start + length)) for part in trajectory.segments]
    places = np.concatenate(kept)
    if len(places) == len(trajectory.token_ids):
        return trajectory
    per_token = ["token_ids", "action_mask", "behavior_logprobs", "versions"]
    per_token += [name for name in ("turn_of_token", "repeats") if getattr(trajectory, name) is not None]
    starts = np.cumsum([0, *(len(part) for part in kept[:-1])]).tolist()
    fields = {name: getattr(trajectory, name)[places] for name in per_token}
    return replace(trajectory, **fields, segment_starts=tuple(starts))


def pad_rows(
    trajectories: Sequence[Trajectory], multiple: int = 1, advantages: Sequence[np.ndarray] = ()
) -> dict[str, Tensor]:
    """A row a segment, padded at its end to the longest, rounded up to `multiple`.

    Args:
        trajectories: R of them, in row order. None at all gives one masked row of `multiple` padding tokens, so that
            a rank without work still runs the model and joins every collective.
        multiple: S is one of its multiples.
        advantages: of each trajectory's tokens, float32 [S] each, where turns have advantages of their own.

    Returns:
        tokens, position_ids, targets: int64 [G, S].
        target_mask: bool [G, S], True where the target is a token that the policy sampled.
        behavior_logprobs: float32 [G, S], the sampler's of the target; 0 where target_mask is False.
        row_index: int64 [G, S], the place in `trajectories` that a position belongs to, padding included.
        lengths: int32 [G], tokens without padding; 0 for the row that stands for no trajectory.
        token_advantages: float32 [G, S], of the target, where `advantages` are given.

    Raises:
        ValueError: a segment begins with an action token, which no position predicts.
    """
    segments = [(row, t, part) for row, t in enumerate(trajectories) for part in t.segments]
    lengths = [part.stop - part.start for _, _, part in segments] or [0]
    width = -(-max(1, *lengths) // multiple) * multiple
    fields = _empty_fields((len(lengths), width), bool(advantages))
    for place, (row, trajectory, part) in enumerate(segments):
        fields["row_index"][place] = row
        own = advantages[row] if advantages else None
        _fill({name: values[place] for name, values in fields.items()}, trajectory, part, own)
    tensors = {name: torch.from_numpy(values) for name, values in fields.items()}
    return {**tensors, "lengths": torch.tensor(lengths, dtype=torch.int32)}


def pack_rows(
    trajectories: Sequence[Trajectory], multiple: int = 1, advantages: Sequence[np.ndarray] = ()
) -> dict[str, Tensor]:
    """All segments one after another in a single row (THD), each padded at its end to `multiple`.

    Args:
        trajectories: R of them, in order. None at all gives one masked segment of `multiple` padding tokens.
        multiple: the length of every segment, and so N, is one of its multiples.
        advantages: as for pad_rows.

    Returns:
        tokens, position_ids, targets, target_mask, behavior_logprobs, row_index, token_advantages: [1, N], as from
            pad_rows; position_ids start at 0 again with each segment.
        cu_seqlens: int32 [G + 1], where segments begin and end, padding included: attention stays between two of them.
            A segment's padding comes last, so that causal attention hides it from the segment's own tokens.
        max_seqlen: int32 [], the longest segment.
        lengths: int32 [G], tokens without padding.

    Raises:
        ValueError: as pad_rows.
    """
    segments = [(row, t, part) for row, t in enumerate(trajectories) for part in t.segments]
    lengths = [part.stop - part.start for _, _, part in segments] or [0]
    sizes = [-(-max(1, length) // multiple) * multiple for length in lengths]
    starts = np.cumsum([0, *sizes])
    fields = _empty_fields((int(starts[-1]),), bool(advantages))
    for (row, trajectory, part), begin, end in zip(segments, starts, starts[1:], strict=False):
        fields["row_index"][begin:end] = row
        own = advantages[row] if advantages else None
        _fill({name: values[begin:end] for name, values in fields.items()}, trajectory, part, own)
    tensors = {name: torch.from_numpy(values)[None] for name, values in fields.items()}
    return {
        **tensors,
        "cu_seqlens": torch.from_numpy(starts.astype(np.int32)),
        "max_seqlen": torch.tensor(max(sizes), dtype=torch.int32),
        "lengths": torch.tensor(lengths, dtype=torch.int32),
    }


def _empty_fields(shape: tuple[int, ...], with_advantages: bool) -> dict[str, np.ndarray]:
    """Padding everywhere."""
    extra = {"token_advantages": np.zeros(shape, dtype=np.float32)} if with_advantages else {}
    return {
        **extra,
        "tokens": np.full(shape, PAD_TOKEN, dtype=np.int64),
        "position_ids": np.zeros(shape, dtype=np.int64),  # of padding too: never beyond a learned position table
        "targets": np.full(shape, PAD_TOKEN, dtype=np.int64),
        "target_mask": np.zeros(shape, dtype=bool),
        "behavior_logprobs": np.zeros(shape, dtype=np.float32),
        "row_index": np.zeros(shape, dtype=np.int64),
    }


def _fill(row: dict[str, np.ndarray], trajectory: Trajectory, segment: slice, advantages: np.ndarray | None) -> None:
    """Writes one segment over the padding of its row, shifting what belongs to predictions."""
    token_ids, action_mask = trajectory.token_ids[segment], trajectory.action_mask[segment]
    length = len(token_ids)
    if length and action_mask[0]:
        raise ValueError(
            f"the trajectory of prompt {trajectory.prompt_index} begins with an action token, which nothing predicts: "
            "begin it, and each of its segments, with a prompt of at least one token"
        )
    row["tokens"][:length] = token_ids
    row["position_ids"][:length] = np.arange(length)
    if length > 1:
        sampled = action_mask[1:]
        row["targets"][: length - 1] = token_ids[1:]
        row["target_mask"][: length - 1] = sampled
        row["behavior_logprobs"][: length - 1] = np.where(sampled, trajectory.behavior_logprobs[segment][1:], 0)
        if advantages is not None:
            row["token_advantages"][: length - 1] = advantages[segment][1:]
