"""The one place where text and token ids meet: prompts and observations to ids, sampled ids to text.

What a tool, a data set or the policy wrote is text and stays text: a special token's spelling in it never becomes that
token. Only what the chat template writes around it may.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from nemo_flashrl.environments.environment import Message
from nemo_flashrl.environments.guard import in_words
from nemo_flashrl.weight_sync.hf_reader import refuse_lfs_pointer, with_tokenizer_fields

# No token spells more characters than this but in runs of blanks; what is longer is cut before it is encoded,
# so that 100 MB of tool output cost nothing.
_CHARACTERS_PER_TOKEN = 64
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of them is enough
# Places to cut a rendered template. Noncharacters: no text may hold them, and `_clean` takes them out where one does.
_OPEN, _CLOSE, _HERE = "\ufdd0", "\ufdd1", "\ufdd2"
_PLACE = re.compile(f"({_OPEN}[0-9]+{_CLOSE}|{_HERE})")


@dataclass(frozen=True, slots=True)
class Observation:
    """A tool's answer as the policy sees it."""

    text: str
    ids: tuple[int, ...]
    removed: int = 0  # characters that were cut out


def read_tokenizer(folder: str | Path) -> Any:
    """The Hugging Face tokenizer of `model.path`, by transformers 4 also where 5 has saved it.

    Raises:
        ValueError: one line: it is not there, is a Git LFS pointer, or cannot be read.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    where = f"model.path={str(folder)!r}"
    there = [Path(folder) / name for name in _TOKENIZER_FILES if (Path(folder) / name).is_file()]
    if not there:
        raise ValueError(f"{where} holds no tokenizer, none of {', '.join(_TOKENIZER_FILES)}: copy it from the model")
    for path in (*there, *Path(folder).glob("tokenizer_config.json")):
        refuse_lfs_pointer(path)
    try:
        settings = Path(folder) / "tokenizer_config.json"
        written = json.loads(settings.read_text()) if settings.is_file() else {}
        read = with_tokenizer_fields(written)
        changed = {name: value for name, value in read.items() if written.get(name) != value}
        new_class = changed.pop("tokenizer_class", None)
        if changed:
            changed["extra_special_tokens"] = {}
        loader = PreTrainedTokenizerFast if new_class else AutoTokenizer
        return loader.from_pretrained(folder, local_files_only=True, **changed)
    except Exception as error:  # of tokenizers, sentencepiece or transformers, each of another type
        said = in_words(error).splitlines()[0]
        raise ValueError(f"{where} holds no loadable tokenizer ({said}): copy it again") from error


class Codec:
    """Encodes with a Hugging Face tokenizer what goes into a trajectory; never re-encodes what is in it.

    Raises:
        ValueError: a message that the tokenizer's chat template refuses, or does not show.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        added = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        named = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        self._special = frozenset({*added.values(), *named.values()})
        self._spellings = sorted({*added, *named}, key=len, reverse=True)  # the longest first
        self._spelling = re.compile("|".join(map(re.escape, self._spellings)) or "(?!)")
        self._unknown: int | None = tokenizer.unk_token_id
        # Of what the tokenizer adds by itself only the begin-of-text token belongs before an answer.
        self._start = [i for i in tokenizer("").input_ids if i == tokenizer.bos_token_id]
        if self._has_template:
            probe = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
            self._render([*probe, {"role": "user", "content": _HERE}], must_show=True)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """The prompt: the chat template with its generation prompt, or the plain concatenation of the contents."""
        if self._has_template:
            return self._encode(self._render([self._safe(message) for message in messages]))
        return self._start + self._plain("".join(message["content"] for message in messages))

    def action_text(self, token_ids: Sequence[int], stop_token_ids: Sequence[int]) -> str:
        """What the policy said. A closing special token is left out; a stop token that is a word stays."""
        if token_ids and token_ids[-1] in stop_token_ids and token_ids[-1] in self._special:
            token_ids = token_ids[:-1]
        return self._decode(token_ids)

    def observation(self, text: str, max_tokens: int, keep: str = "head") -> Observation:
        """`text` as at most `max_tokens` tokens, and where it was cut a mark that says how much is missing.

        `keep` is what stays of a longer one: its "head", its "tail", or half of each with "both". The mark comes on
        top of `max_tokens`.
        """
        window = max_tokens * _CHARACTERS_PER_TOKEN
        if len(text) <= window:
            ids = self._plain(text)
            if len(ids) <= max_tokens:
                return Observation(_clean(text), tuple(ids))
        tail_size = {"head": 0, "tail": max_tokens, "both": max_tokens // 2}[keep]
        head = self._plain(text[:window])[: max_tokens - tail_size]
        tail = self._plain(text[-window:])[-tail_size:] if tail_size else []
        head_text, tail_text = self._decode(head), self._decode(tail)
        removed = max(1, len(text) - len(head_text) - len(tail_text))
        mark = f"[{removed} characters cut]"
        mark = f"{mark}\n" if not head else f"\n{mark}" if not tail else f"\n{mark}\n"
        return Observation(head_text + mark + tail_text, (*head, *self._plain(mark), *tail), removed)

    def next_ids(
        self, messages: Sequence[Message], action: str, action_ids: Sequence[int], observation: Observation, role: str
    ) -> tuple[list[int], bool]:
        """What the policy sees after an action.

        Args:
            messages: what came before the action.
            action, action_ids: the action as text and as it was sampled.
            observation: the answer to it, shown in a message of `role`.

        Returns:
            (ids, False): the suffix that follows the sampled ids, or (ids, True): a whole new prompt, because the
            template now shows something else where the earlier tokens were: Qwen3's, say, strips earlier thinking.
        """
        if not self._has_template:
            return list(observation.ids), False
        before = [self._safe(message) for message in messages]
        said = self._safe({"role": "assistant", "content": action})
        text = self._render([*before, said, {"role": role, "content": _HERE}], must_show=True)
        end = _end_of_action(text, self._render(before), said["content"])
        if end is None:
            return self._encode(text, observation.ids), True
        ids = self._encode(text[end:], observation.ids)
        if ids and action_ids and ids[0] == action_ids[-1] and ids[0] in self._special:
            ids = ids[1:]  # the policy closed its turn itself
        return ids, False

    def _safe(self, message: Message) -> Message:
        """The message with a placeholder for every special token's spelling, which templates pass through."""
        content = self._spelling.sub(
            lambda found: f"{_OPEN}{self._spellings.index(found[0])}{_CLOSE}", _clean(message["content"])
        )
        return {**message, "content": content}

    def _render(self, messages: Sequence[Message], must_show: bool = False) -> str:
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            roles = [message.get("role") for message in messages]
            raise ValueError(f"the chat template refuses messages of the roles {roles}: {error}") from error
        if must_show and text.count(_HERE) != 1:
            raise ValueError("the chat template does not show every message once: it cannot frame observations")
        return text

    def _encode(self, rendered: str, observation_ids: Sequence[int] = ()) -> list[int]:
        """A rendered template: its own special tokens are special, placeholders are text again."""
        ids: list[int] = []
        for piece in _PLACE.split(rendered):
            if piece == _HERE:
                ids += observation_ids
            elif piece.startswith(_OPEN):
                ids += self._plain(self._spellings[int(piece[1:-1])])
            elif piece:
                ids += self._tokenizer.encode(piece, add_special_tokens=False)
        return ids

    def _plain(self, text: str) -> list[int]:
        """Ids of untrusted text.

        What the tokenizer would still take for special becomes `<unk>`, or is dropped where there is none.
        """
        ids = self._tokenizer.encode(_clean(text), add_special_tokens=False, split_special_tokens=True)
        if not self._special.isdisjoint(ids):
            ids = [self._unknown if i in self._special else i for i in ids]
            ids = [i for i in ids if i is not None]
        return ids

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            list(token_ids),
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
            spaces_between_special_tokens=False,
        )


def _clean(text: str) -> str:
    """Without half surrogate pairs, which are no text and cannot be encoded, and without noncharacters."""
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return re.sub(f"[{_OPEN}-{_HERE}]", "\ufffd", text)


def _end_of_action(text: str, before: str, action: str) -> int | None:
    """Where the action ends in a rendered template that begins with `before`; None if it does not follow there.

    Templates trim a message or put blank lines around a tag: blanks may differ, since the sampled ids stay anyway.
    """
    if not text.startswith(before):
        return None
    if text.startswith(action, len(before)):
        return len(before) + len(action)
    position = len(before)
    for letter in action:
        if letter.isspace():
            continue
        while position < len(text) and text[position].isspace():
            position += 1
        if not text.startswith(letter, position):
            return None
        position += 1
    for letter in action[len(action.rstrip()) :]:  # the blanks at its end, as far as the template kept them
        position += text.startswith(letter, position)
    return position
