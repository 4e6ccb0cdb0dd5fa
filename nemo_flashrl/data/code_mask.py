"""Which of a trajectory's tokens stand inside fenced code.

    tokens    Sure | , here: | \\n``` | python\\n | print | (1) | \\n | ``` | \\n Done
    code         .         .        .           .       x     x     x     .          .

A token belongs to the code if one of its characters does; the fences do not. Tokens are decoded one by one: what is
looked for (line breaks, back quotes, blanks) is ASCII, which no token shares with a piece of a multi-byte character, so
that a character that is spread over tokens cannot shift anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from nemo_flashrl.records import Trajectory

_OPENING = re.compile(r" {0,3}(`{3,})[^`]*$")
_CLOSING = re.compile(r" {0,3}(`{3,})\s*$")


class CodeMask:
    """Keeps the action mask on code alone; each turn begins outside of it, and an open fence lasts to its end.

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
