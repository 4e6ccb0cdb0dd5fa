"""The one place where text and token ids meet: prompts and observations to ids, sampled ids to text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nemo_flashrl.environments.environment import Message

# No token spells more characters than this but in runs of blanks; what is longer is cut before it is encoded,
# so that 100 MB of tool output cost nothing.
_CHARACTERS_PER_TOKEN = 64
_ACTION, _OBSERVATION = "\u241fACTION\u241f", "\u241fOBSERVATION\u241f"  # places to cut a rendered template


class Codec:
    """Encodes with a Hugging Face tokenizer what goes into a trajectory; never re-encodes what is in it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        self._special = frozenset(tokenizer.all_special_ids)
        self._unknown: int | None = tokenizer.unk_token_id
        self._before, self._after = self._turn_frame() if self._has_template else ([], [])

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """The prompt: the chat template with its generation prompt, or the plain concatenation of the contents."""
        if self._has_template:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
            return list(self._tokenizer(text, add_special_tokens=False).input_ids)
        return list(self._tokenizer("".join(message["content"] for message in messages)).input_ids)

    def action_text(self, token_ids: Sequence[int], stop_token_ids: Sequence[int]) -> str:
        """What the policy said. A closing special token is left out; a stop token that is a word stays."""
        if token_ids and token_ids[-1] in stop_token_ids and token_ids[-1] in self._special:
            token_ids = token_ids[:-1]
        return self._tokenizer.decode(
            list(token_ids),
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
            spaces_between_special_tokens=False,
        )

    def observation_ids(self, text: str, action_ids: Sequence[int], max_tokens: int) -> tuple[list[int], bool]:
        """The suffix that follows an action: `text` as at most `max_tokens` tokens, in the template's frame if any.

        Returns the ids and whether `text` was cut (its head stays). A tool's text never becomes a special token,
        however it is spelt: what the tokenizer would still take for one becomes the unknown token, or goes.
        """
        head = text[: max_tokens * _CHARACTERS_PER_TOKEN]
        ids = self._tokenizer(head, add_special_tokens=False, split_special_tokens=True).input_ids
        if not self._special.isdisjoint(ids):
            ids = [self._unknown if i in self._special else i for i in ids]
            ids = [i for i in ids if i is not None]
        cut = len(head) < len(text) or len(ids) > max_tokens
        before = self._before
        if before and action_ids and action_ids[-1] == before[0]:  # the policy closed its turn itself
            before = before[1:]
        return before + ids[:max_tokens] + self._after, cut

    def _turn_frame(self) -> tuple[list[int], list[int]]:
        """What the chat template puts between an action and its observation, and between that and the next action."""
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _ACTION},
            {"role": "user", "content": _OBSERVATION},
        ]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if text.count(_ACTION) != 1 or text.count(_OBSERVATION) != 1:
            raise ValueError("the chat template does not show every message once: it cannot frame observations")
        before, after = text.split(_ACTION)[1].split(_OBSERVATION)
        return tuple(list(self._tokenizer(piece, add_special_tokens=False).input_ids) for piece in (before, after))
