"""The codec without its short cuts, which renders all by transformers, twice a turn; the real one beside it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from nemo_flashrl.environments.environment import Message
from nemo_flashrl.rollout.chat_tokens import Codec, Conversation


class PlainCalls:
    """As `TokenizerCalls`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def render(self, messages: Sequence[Message]) -> str:
        return self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)

    def encode(self, text: str, split_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=split_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        options = {"clean_up_tokenization_spaces": False, "spaces_between_special_tokens": False}
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False, **options)

    def surely_fits(self, text: str, max_tokens: int) -> bool:
        return False


class PlainCodec(Codec):
    """As `Codec`."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self._calls = PlainCalls(tokenizer)
        self._encode_often = self._encode

    def _renderings(self, conversation: Conversation) -> Iterator[tuple[str, str]]:
        yield self._render(conversation[:-2]), self._render(conversation)


def random_text(rng: random.Random) -> str:
    words = ("lower", " 42", "\n", "\n\n", "  ", "!", "é", "数", "\U0001f600", "<|im_end|>", "</s>", "\ufdd0", "Is it?")
    return "".join(rng.choice(words) for _ in range(rng.randrange(12)))


def check_conversations(tokenizer: Any, seeds: range, turns: int = 9) -> None:
    """Of random messages: the same ids, and the same new prompts, whichever codec makes them."""
    ours, plain = Codec(tokenizer), PlainCodec(tokenizer)
    ends = tuple({tokenizer.eos_token_id, *ours.turn_ends} - {None})
    for seed in seeds:
        rng = random.Random(seed)
        first = [{"role": "system", "content": random_text(rng)}] if rng.random() < 0.3 else []
        first.append({"role": "user", "content": random_text(rng) + "Q"})
        try:
            talks = [codec.begin(first) for codec in (ours, plain)]
        except ValueError:  # a template that knows no system
            first = first[-1:]
            talks = [codec.begin(first) for codec in (ours, plain)]
        assert ours.prompt_ids(talks[0]) == plain.prompt_ids(talks[1])
        for _ in range(turns):
            action = tokenizer.encode(random_text(rng), add_special_tokens=False)
            action = [i for i in action if i not in ours._special] + ([rng.choice(ends)] if rng.random() < 0.7 else [])
            text, size, keep = random_text(rng), rng.randrange(1, 40), rng.choice(["head", "tail", "both"])
            seen = [codec.observation(text, size, keep) for codec in (ours, plain)]
            said = [codec.action_text(action, ends) for codec in (ours, plain)]
            assert seen[0] == seen[1] and said[0] == said[1]
            role = rng.choice(["user", "user", "tool"])
            answers = [
                codec.next_ids(talk, said[0], action, seen[0], role, ends)
                for codec, talk in zip((ours, plain), talks, strict=True)
            ]
            assert answers[0] == answers[1], (seed, role, text)
            assert ours.prompt_ids(ours.begin(talks[0])) == plain.prompt_ids(plain.begin(talks[1]))
