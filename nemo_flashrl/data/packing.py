"""One microbatch of trajectories -> tensors, and the one place where tokens are shifted against their predictions.

Legend: R = trajectories of the microbatch, S = row length, N = tokens of a packed row; both are multiples of
`multiple`.

A trajectory's log-prob[t] scores token t given the tokens before it. A model's output at position t predicts token t +
1. So everything that is compared with an output is moved one to the left here and is from then on aligned to the
predicting position: `targets[t] = token[t + 1]`, and `target_mask` and `behavior_logprobs` with it. The last position
of a trajectory predicts nothing and is masked.

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
    """Its first `length` tokens; the trajectory itself if it has no more. Reward and end reason stay."""
    if len(trajectory.token_ids) <= length:
        return trajectory
    per_token = ("token_ids", "action_mask", "behavior_logprobs", "versions")
    return replace(trajectory, **{name: getattr(trajectory, name)[:length] for name in per_token})


def pad_rows(trajectories: Sequence[Trajectory], multiple: int = 1) -> dict[str, Tensor]:
    """A row a trajectory, padded at its end to the longest, rounded up to `multiple`.

    Args:
        trajectories: R of them, in row order. None at all gives one masked row of `multiple` padding tokens, so that
            a rank without work still runs the model and joins every collective.
        multiple: S is one of its multiples.

    Returns:
        tokens, position_ids, targets: int64 [R, S].
        target_mask: bool [R, S], True where the target is a token that the policy sampled.
        behavior_logprobs: float32 [R, S], the sampler's of the target; 0 where target_mask is False.
        row_index: int64 [R, S], the place in `trajectories` that a position belongs to, padding included.
        lengths: int32 [R], tokens without padding; 0 for the row that stands for no trajectory.

    Raises:
        ValueError: a trajectory begins with an action token, which no position predicts.
    """
    lengths = [len(t.token_ids) for t in trajectories] or [0]
    width = -(-max(1, *lengths) // multiple) * multiple
    fields = _empty_fields((len(lengths), width))
    fields["row_index"] += np.arange(len(lengths))[:, None]
    for row, trajectory in enumerate(trajectories):
        _fill({name: values[row] for name, values in fields.items()}, trajectory)
    tensors = {name: torch.from_numpy(values) for name, values in fields.items()}
    return {**tensors, "lengths": torch.tensor(lengths, dtype=torch.int32)}


def pack_rows(trajectories: Sequence[Trajectory], multiple: int = 1) -> dict[str, Tensor]:
    """All trajectories one after another in a single row (THD), each padded at its end to `multiple`.

    Args:
        trajectories: R of them, in order. None at all gives one masked segment of `multiple` padding tokens.
        multiple: the length of every segment, and so N, is one of its multiples.

    Returns:
        tokens, position_ids, targets, target_mask, behavior_logprobs, row_index: [1, N], as from pad_rows; position_ids
            start at 0 again with each trajectory.
        cu_seqlens: int32 [R + 1], where segments begin and end, padding included: attention stays between two of them.
            A segment's padding comes last, so that causal attention hides it from the trajectory's own tokens.
        max_seqlen: int32 [], the longest segment.
        lengths: int32 [R], tokens without padding.

    Raises:
        ValueError: as pad_rows.
    """
    lengths = [len(t.token_ids) for t in trajectories] or [0]
    segments = [-(-max(1, length) // multiple) * multiple for length in lengths]
    starts = np.cumsum([0, *segments])
    fields = _empty_fields((int(starts[-1]),))
    for row, (begin, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        fields["row_index"][begin:end] = row
        if trajectories:
            _fill({name: values[begin:end] for name, values in fields.items()}, trajectories[row])
    tensors = {name: torch.from_numpy(values)[None] for name, values in fields.items()}
    return {
        **tensors,
        "cu_seqlens": torch.from_numpy(starts.astype(np.int32)),
        "max_seqlen": torch.tensor(max(segments), dtype=torch.int32),
        "lengths": torch.tensor(lengths, dtype=torch.int32),
    }


def _empty_fields(shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Padding everywhere."""
    return {
        "tokens": np.full(shape, PAD_TOKEN, dtype=np.int64),
        "position_ids": np.zeros(shape, dtype=np.int64),  # of padding too: never beyond a learned position table
        "targets": np.full(shape, PAD_TOKEN, dtype=np.int64),
        "target_mask": np.zeros(shape, dtype=bool),
        "behavior_logprobs": np.zeros(shape, dtype=np.float32),
        "row_index": np.zeros(shape, dtype=np.int64),
    }


def _fill(row: dict[str, np.ndarray], trajectory: Trajectory) -> None:
    """Writes one trajectory over the padding of its row, shifting what belongs to predictions."""
    length = len(trajectory.token_ids)
    if length and trajectory.action_mask[0]:
        raise ValueError(
            f"the trajectory of prompt {trajectory.prompt_index} begins with an action token, which nothing predicts: "
            "begin it with a prompt of at least one token"
        )
    row["tokens"][:length] = trajectory.token_ids
    row["position_ids"][:length] = np.arange(length)
    if length > 1:
        sampled = trajectory.action_mask[1:]
        row["targets"][: length - 1] = trajectory.token_ids[1:]
        row["target_mask"][: length - 1] = sampled
        row["behavior_logprobs"][: length - 1] = np.where(sampled, trajectory.behavior_logprobs[1:], 0)
