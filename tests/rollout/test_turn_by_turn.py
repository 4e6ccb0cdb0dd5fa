"""A conversation that grows turn by turn against one that is rendered whole each time; what templates allow it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from plain_codec import check_conversations
from real_models import DEEPSEEK, QWEN
from test_chat_tokens import (
    CHATML,
    GLM,
    LLAMA_2,
    LLAMA_3,
    MISTRAL,
    PHI_3,
    ZEPHYR,
    byte_level,
    sentencepiece,
)

from nemo_flashrl.rollout.episode import turn_seed
from nemo_flashrl.rollout.tokenizer_calls import TokenizerCalls

# As Qwen3's: of earlier answers the thought is not shown.
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% set text = m.content %}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{% set text = text.split('!')[-1].lstrip('\\n') %}"
    "{% endif %}{{ '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
NEIGHBOURS = (  # each message shows the one before, the first one and whether one follows
    "{{ messages[0]['content'] }}{% for m in messages %}{% if not loop.first and messages[loop.index0 - 1].role == "
    "'user' %}<|im_start|>{% endif %}{{ m.role + messages[0].content + m.content }}{% if loop.nextitem is defined %}"
    "{{ loop.nextitem.role }}{% endif %}<|im_end|>{% endfor %}{{ messages[-1].role }}<|im_start|>"
)
NO_TWICE = (  # two users' messages in a row are refused
    "{% for m in messages %}{% if not loop.first and messages[loop.index0 - 1].role == m.role %}"
    "{{ raise_exception('twice') }}{% endif %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKS = ("<|im_start|>", "<|im_end|>", "<|end|>", "<|user|>", "<|assistant|>", "<|eot_id|>", "<｜User｜>")
LOCAL = {
    **{"zephyr": ZEPHYR, "llama 2": LLAMA_2, "llama 3": LLAMA_3, "phi 3": PHI_3, "glm": GLM, "chatml": CHATML},
    **{"qwen": QWEN, "deepseek": DEEPSEEK, "neighbours": NEIGHBOURS, "no twice": NO_TWICE},
}
NUMBERED = CHATML.replace("'<|im_end|>\\n'", "'<|im_end|>' ~ loop.index ~ '\\n'")
COUNT = "'<|im_end|>' }}{% set ns.n = ns.n + 1 %}{{ ns.n }}"
COUNTED = "{% set ns = namespace(n=0) %}" + CHATML.replace("'<|im_end|>\\n' }}", COUNT)
assert NUMBERED != CHATML and "{{ ns.n }}" in COUNTED
WHOLE = {"mistral": MISTRAL, "thinking": THINKING, "numbered": NUMBERED, "counted": COUNTED}


def byte_level_one(template: str) -> Any:
    return byte_level(template, bos_token="<s>", eos_token="</s>", unk_token="<unk>", more=MARKS)


@pytest.mark.parametrize("name", [*LOCAL, *WHOLE])
def test_growing_conversations_have_the_ids_of_whole_ones(name: str) -> None:
    template = (LOCAL | WHOLE)[name]
    check_conversations(byte_level_one(template), range(12))
    if name in ("mistral", "zephyr", "llama 2"):
        check_conversations(sentencepiece("legacy", template), range(6))


def local(template: str) -> bool:
    return TokenizerCalls(byte_level_one(template)).is_local()


@pytest.mark.parametrize("name", [*LOCAL, *WHOLE])
def test_which_templates_show_that_they_write_messages_one_by_one(name: str) -> None:
    assert local((LOCAL | WHOLE)[name]) == (name in LOCAL)


LOOP = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ messages[loop.index0 - 1].content }}{% endfor %}",  # in the first round, the last
        "{% for m in messages %}{% if loop.first and messages[loop.index0 - 1].content %}x{% endif %}{% endfor %}",
        "{% for m in messages %}{% if loop.first or messages[loop.index0 - 2].content %}x{% endif %}{% endfor %}",
        "{% for m in messages %}{{ messages[-1].content }}{% endfor %}",
        "{% for m in messages %}{{ loop.index }}{% endfor %}",
        "{% for m in messages %}{{ loop.length }}{% endfor %}",
        "{% for m in messages %}{% if loop.index0 % 2 == 0 %}{{ m.content }}{% endif %}{% endfor %}",
        "{% for m in messages %}{% if loop.changed(m.role) %}x{% endif %}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}",
        "{% for m in messages %}{% for x in m.content %}{{ messages[loop.index0 + 1].role }}{% endfor %}{% endfor %}",
        "{% for m in messages %}{{ [1, 2] | random }}{% endfor %}",
        "{% for m in messages[1:] %}{{ m.content }}{% endfor %}",
        "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}",
        "{% set ns = namespace(a=1) %}{% for m in messages %}{% set ns.a = 2 %}{{ m.content }}{% endfor %}",
        "{% set c = cycler('a', 'b') %}{% for m in messages %}{{ c.next() }}{% endfor %}",
        "{% macro f() %}{{ messages | length }}{% endmacro %}{% for m in messages %}{{ f() }}{% endfor %}",
        "{% set all = messages %}" + LOOP,
        "{% set messages = messages[1:] %}" + LOOP,
        "{{ messages[-1].content }}" + LOOP,
        "{{ messages | length }}" + LOOP,
        "{% filter upper %}" + LOOP + "{% endfilter %}",
        LOOP + LOOP,
    ],
)
def test_templates_that_may_show_old_messages_otherwise_are_rendered_whole(template: str) -> None:
    assert not local(template)


@pytest.mark.parametrize(
    "numbers", [(0, 0, 0, 0), (1, 2, 3, 4), (2**32 - 1, 7, 0, 99), (2**32, 1, 1, 1), (5, 2**40, 2, 3)]
)
def test_the_seed_of_a_turn_is_numpys(numbers: tuple[int, ...]) -> None:
    words = np.random.SeedSequence(list(numbers)).generate_state(1, np.uint64)
    assert turn_seed(*numbers) == int(words[0]) >> 1
