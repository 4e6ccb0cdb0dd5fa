"""The one place where text and token ids meet: prompts and observations to ids, sampled ids to text.

What a tool, a data set or the policy wrote is text and stays text: a special token's spelling in it never becomes that
token. Only what the chat template writes around it may.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from nemo_flashrl.environments.environment import Message
from nemo_flashrl.rollout.tokenizer_calls import TokenizerCalls, end_of_action

# No token spells more characters than this but in runs of blanks; what is longer is cut before it is encoded,
# so that 100 MB of tool output cost nothing.
_CHARACTERS_PER_TOKEN = 64
# Places to cut a rendered template. Noncharacters: no text may hold them, and `_clean` takes them out where one does.
_OPEN, _CLOSE, _HERE = "\ufdd0", "\ufdd1", "\ufdd2"
_PLACE = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")


class Conversation(list[Message]):
    """Messages as the template is shown them, and what it makes of them all; empty where that is not known."""

    text = ""


@dataclass(frozen=True, slots=True)
class Observation:
    """A tool's answer as the policy sees it."""

    text: str
    removed: int = 0  # characters that were cut out


class Codec:
    """Encodes with a Hugging Face tokenizer what goes into a trajectory; never re-encodes what is in it.

    Raises:
        ValueError: a message that the tokenizer's chat template refuses, or does not show.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._calls = TokenizerCalls(tokenizer)
        self._encode_often = functools.lru_cache(64)(self._encode)  # of special tokens' spellings
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        added = {token.content: (index, token) for index, token in tokenizer.added_tokens_decoder.items()}
        self._ids = {text: index for text, (index, token) in added.items() if token.special}
        self._ids |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        marks = [added[text] for text in self._find_turn_marks(list(added))]
        self._ids |= {token.content: index for index, token in marks}
        self._unmarked = {index for index, token in marks if not token.special}
        self._strips = {text: (token.lstrip, token.rstrip) for text, (_, token) in added.items()}
        self._spellings = sorted(self._ids, key=len, reverse=True)  # the longest first
        self._spelling = re.compile("|".join(map(re.escape, self._spellings)) or "(?!)")
        self._unknown: int | None = tokenizer.unk_token_id
        self._special = frozenset(self._ids.values())
        self._named = {index: text for text, index in self._ids.items() if index != self._unknown}
        # Of what the tokenizer adds by itself only the begin-of-text token belongs before an answer.
        self._start = [i for i in tokenizer("").input_ids if i == tokenizer.bos_token_id]
        self._anchor = next((text for text in self._named.values() if not any(self._strips.get(text, ()))), "")
        self._lead = self._find_lead()
        self._roles: dict[str, str] = {}  # role -> as which the template shows it
        self._shown_role("user")
        # Ids of the special token with which the template ends an answer, and of all that it writes around messages
        self.turn_ends, self._around = self._find_turn_ends()

    def begin(self, messages: Sequence[Message]) -> Conversation:
        """A conversation that begins with `messages`; `next_ids` adds to it."""
        conversation = Conversation(map(self._safe, messages))
        conversation.text = self._render(conversation)
        return conversation

    def prompt_ids(self, conversation: Conversation) -> list[int]:
        """All of it: the chat template with its generation prompt, or the plain concatenation of the contents."""
        ids = self._encode(conversation.text)
        return ids if self._has_template else self._start + ids

    def holds_chat_tokens(self, token_ids: Sequence[int]) -> bool:
        """Whether a special token that the template writes around messages stands before the end of an answer."""
        return not self._around.isdisjoint(token_ids[:-1])

    def action_text(self, token_ids: Sequence[int], stop_token_ids: Sequence[int]) -> str:
        """What the policy said. A closing special token is left out; a stop token that is a word stays."""
        if token_ids and token_ids[-1] in stop_token_ids and token_ids[-1] in self._special:
            token_ids = token_ids[:-1]
        return self.decode(token_ids)

    def observation(self, text: str, max_tokens: int, keep: str = "head") -> Observation:
        """`text` as at most `max_tokens` tokens, and where it was cut a mark that says how much is missing.

        `keep` is what stays of a longer one: its "head", its "tail", or half of each with "both". The mark comes on
        top of `max_tokens`.
        """
        window = max_tokens * _CHARACTERS_PER_TOKEN
        if self._calls.surely_fits(text, max_tokens) or (len(text) <= window and len(self._plain(text)) <= max_tokens):
            return Observation(_clean(text))
        tail_size = {"head": 0, "tail": max_tokens, "both": max_tokens // 2}[keep]
        head_size = max_tokens - tail_size
        head = self.decode(self._plain(text[:window])[:head_size])
        tail = self.decode(self._plain(text[-window:])[-tail_size:]) if tail_size else ""
        removed = max(1, len(text) - len(head) - len(tail))
        mark = f"[{removed} characters cut]"
        mark = f"{mark}\n" if not head else f"\n{mark}" if not tail else f"\n{mark}\n"
        return Observation(head + mark + tail, removed)

    def next_ids(
        self,
        conversation: Conversation,
        action: str,
        action_ids: Sequence[int],
        observation: Observation,
        role: str,
        stop_token_ids: Sequence[int] = (),
    ) -> tuple[list[int], bool]:
        """What the policy sees after an action: as in one encoding of the whole rendered conversation.

        Args:
            conversation: what came before the action; action and observation are added to it.
            action, action_ids: the action as text and as it was sampled.
            observation: the answer to it, shown in a message of `role`.
            stop_token_ids: with which of them the policy may have closed its turn.

        Returns:
            (ids, False): the suffix that follows the sampled ids, or (ids, True): a whole new prompt, because the
            template now shows something else where the earlier tokens were: Qwen3's, say, strips earlier thinking.
        """
        said = self._safe({"role": "assistant", "content": action})
        conversation += said, self._safe({"role": self._shown_role(role), "content": observation.text})
        for prompt, text in self._renderings(conversation):
            end = end_of_action(text, prompt, said["content"])
            if end is not None:
                break
        else:
            return self._encode(text), True
        last, rest = action_ids[-1] if action_ids else None, text[end:]
        closing = self._spelling.match(rest.lstrip())
        template_closes = closing is not None and self._ids[closing[0]] in {*self.turn_ends, last}
        if last in self._named and (last in stop_token_ids or template_closes):  # the policy closed its turn itself
            rest = rest.lstrip()[closing.end() :] if template_closes else rest
            return self._continue(self._named[last], rest), False
        return self._continue(text[len(prompt) : end], rest), False

    def _find_lead(self) -> str:
        """What makes a tokenizer encode text as it does after a special token, where that is not as at the start.

        SentencePiece's put a blank before the first word of a text; some of them also after every special token.
        """
        encode = self._tokenizer.encode
        after = encode(f"{self._anchor}a", add_special_tokens=False)[1:]
        return "\n" if self._anchor and after != encode("a", add_special_tokens=False) else ""

    def _find_turn_marks(self, added: list[str]) -> list[str]:
        """Spellings with which the template parts messages: they are special, whatever the tokenizer's file calls them.

        DeepSeek's `<｜User｜>` and `<｜Assistant｜>` are not marked as special there.
        """
        pattern = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))) or "(?!)")
        _, opening, closing, *_ = [*self._framed("user", "assistant", "user").split(_HERE), "", "", ""]
        return [*pattern.findall(opening)[:1], *pattern.findall(closing)]  # what follows `opening` may be <think>

    def _framed(self, *roles: str) -> str:
        """What the template makes of messages that each say `_HERE`; "" where there is none, or it refuses them."""
        said = [{"role": role, "content": _HERE} for role in roles]
        try:
            return self._tokenizer.apply_chat_template(said, tokenize=False) if self._has_template else ""
        except (TemplateError, ValueError, TypeError, KeyError):  # of one that cannot end with an answer
            return ""

    def _find_turn_ends(self) -> tuple[frozenset[int], frozenset[int]]:
        text = self._framed("user", "assistant")
        end = self._spelling.match(text.rpartition(_HERE)[2].lstrip())
        around = frozenset(self._ids[spelling] for spelling in self._spelling.findall(text)) & self._named.keys()
        return frozenset({self._ids[end[0]]} if end else ()), around

    def _shown_role(self, role: str) -> str:
        """`role`, or "user" in place of "tool" where the template knows no tool; ValueError if it shows neither."""
        if role not in self._roles and self._has_template:
            said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
            shown = role
            try:
                self._render([*said, {"role": role, "content": _HERE}], must_show=True)
            except (ValueError, TypeError, KeyError):  # templates raise what they like over fields that are not there
                if role != "tool":
                    raise
                shown = "user"
            self._roles[role] = shown
        return self._roles.get(role, role)

    def _safe(self, message: Message) -> Message:
        """The message with a placeholder for every special token's spelling, which templates pass through."""
        content = self._spelling.sub(
            lambda found: f"{_OPEN}{self._spellings.index(found[0])}{_CLOSE}", _clean(message["content"])
        )
        role = message.get("role")
        return {**message, "content": content, **({"role": self._shown_role(role)} if role == "tool" else {})}

    def _render(self, messages: Sequence[Message], must_show: bool = False) -> str:
        if not self._has_template:
            return "".join(message["content"] for message in messages)
        try:
            text = self._calls.render(messages)
        except TemplateError as error:
            roles = [message.get("role") for message in messages]
            raise ValueError(f"the chat template refuses messages of the roles {roles}: {error}") from error
        if must_show and text.count(_HERE) != 1:
            raise ValueError("the chat template does not show every message once: it cannot frame observations")
        return text

    def _renderings(self, conversation: Conversation) -> Iterator[tuple[str, str]]:
        """The conversation without its last two messages, and with them; what costs least comes first."""
        last, conversation.text = conversation.text, ""
        near = [conversation[0], *conversation[-4:]] if self._has_template and self._calls.is_local() else conversation
        if len(near) < len(conversation):
            with contextlib.suppress(Exception):  # a template may refuse such neighbours: then all are shown to it
                yield self._render(near[:-2]), self._render(near)
        conversation.text = text = self._render(conversation)
        if last:
            yield last, text
        yield self._render(conversation[:-2]), text  # of a template that tells the time, it may have become another

    def _continue(self, context: str, text: str) -> list[int]:
        """Ids of `text` as they follow `context` in one encoding of both, wherever that has a boundary there."""
        if self._spelling.match(text):
            context = ""
        for before in filter(None, (context, self._anchor)):
            start, whole = self._encode_often(before), self._encode(before + text)
            if whole[: len(start)] == start:
                return whole[len(start) :]
        return self._encode(text)

    def _encode(self, rendered: str) -> list[int]:
        """A rendered template: its own special tokens are special, placeholders are text again."""
        if _OPEN not in rendered:
            ids = self._calls.encode(rendered, self._tokenizer.split_special_tokens)
            own = [self._ids[text] for text in self._spelling.findall(rendered)]
            if [i for i in ids if i in self._named] == [i for i in own if i in self._named]:
                return ids
        ids, left = [], ""
        pieces = re.split(f"({self._spelling.pattern})", rendered)
        for place in range(0, len(pieces), 2):
            text, right = pieces[place], (pieces[place + 1] if place + 1 < len(pieces) else "")
            text = text.lstrip() if left and self._strips.get(left, (False, False))[1] else text
            text = text.rstrip() if right and self._strips.get(right, (False, False))[0] else text
            ids += self._plain(_PLACE.sub(lambda found: self._spellings[int(found[1])], text), bool(left))
            ids += [self._ids[right]] if right else []
            left = right
        return ids

    def _plain(self, text: str, after_special: bool = False) -> list[int]:
        """Ids of untrusted text.

        What the tokenizer would still take for special becomes `<unk>`, or is dropped where there is none.
        """
        text = _clean(text)
        if not text:
            return []
        encode = functools.partial(self._calls.encode, split_special_tokens=True)
        ids = encode(text)
        if after_special and self._lead:
            start, whole = encode(self._lead), encode(self._lead + text)
            ids = whole[len(start) :] if whole[: len(start)] == start else ids
        if not self._unmarked.isdisjoint(ids):  # the tokenizer finds these in any text, but not when they are halved
            halved = self._spelling.sub(lambda found: f"{found[0][0]}{_HERE}{found[0][1:]}", text)
            ids = [i for half in halved.split(_HERE) for i in encode(half)]
        if not self._special.isdisjoint(ids):
            ids = [self._unknown if i in self._special else i for i in ids]
            ids = [i for i in ids if i is not None]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, special tokens spelt out."""
        return self._calls.decode(token_ids)


def _clean(text: str) -> str:
    """Without half surrogate pairs, which are no text and cannot be encoded, and without noncharacters."""
    if text.isascii():
        return text
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return re.sub(f"[{_OPEN}-{_HERE}]", "\ufffd", text)
