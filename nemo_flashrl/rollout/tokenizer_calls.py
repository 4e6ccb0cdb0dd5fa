"""transformers' calls that every turn needs, without what it does around them: the same text, the same ids.

A chat template is rendered whole each turn, since it may show anything anew; what made that dear is that Jinja's
sandbox looks up each message's field in some thirty steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, optimizeconst
from tokenizers import models, normalizers
from transformers.utils.chat_template_utils import _compile_jinja_template

from nemo_flashrl.environments.environment import Message

FIELDS = ("role", "content")
LOOP = ("first", "last", "index", "index0")


class TokenizerCalls:
    """Of a Hugging Face tokenizer. One that is not transformers' own code is called as it wants to be."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._fast = getattr(tokenizer, "is_fast", False) and all(
            _is_of_transformers(tokenizer, name) for name in ("encode", "_batch_encode_plus", "decode", "_decode")
        )
        self._byte_level = self._fast and _is_byte_level(tokenizer.backend_tokenizer)
        self._template: tuple[str, Callable[..., str]] | None = None  # its source, and what renders it

    def render(self, messages: Sequence[Message]) -> str:
        """`apply_chat_template` with the generation prompt. Raises what the template raises."""
        tokenizer = self._tokenizer
        if not _is_of_transformers(tokenizer, "apply_chat_template"):
            return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        source = tokenizer.get_chat_template()
        if self._template is None or self._template[0] != source:
            environment = _compile_jinja_template(source).environment.overlay()
            environment.code_generator_class = _ShortLookups
            given = {"tools": None, "documents": None, "add_generation_prompt": True} | tokenizer.special_tokens_map
            self._template = source, functools.partial(environment.from_string(source).render, given)
        return self._template[1](messages=list(messages))

    def encode(self, text: str, split_special_tokens: bool) -> list[int]:
        """`encode` without special tokens of its own."""
        backend = self._tokenizer.backend_tokenizer if self._fast else None
        if backend is None or backend.truncation or backend.padding:
            options = {"add_special_tokens": False, "split_special_tokens": split_special_tokens}
            return self._tokenizer.encode(text, **options)
        backend.encode_special_tokens = split_special_tokens
        return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, special tokens spelt out."""
        if self._fast:
            return self._tokenizer.backend_tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return self._tokenizer.decode(
            list(token_ids),
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
            spaces_between_special_tokens=False,
        )

    def surely_fits(self, text: str, max_tokens: int) -> bool:
        """Whether `text` is so short that it cannot be more tokens; False says nothing.

        A token of a byte-level BPE stands for a byte at least, and a text's NFC has at most three times its bytes in
        UTF-8 (Unicode Standard Annex 15).
        """
        if not self._byte_level or len(text) > max_tokens:
            return False
        return text.isascii() or 3 * len(text.encode(errors="surrogatepass")) <= max_tokens


class _ShortLookups(CodeGenerator):
    """Compiles a template to code that reads a message's fields, and a loop's, where they are.

    All else, and a field that is not there, is left to the environment, which is transformers' sandbox.
    """

    @optimizeconst
    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:
        """`message.role`, `loop.index0`."""
        if node.attr in FIELDS:
            self._look_up("getattr", node, node.attr, frame)
        elif node.attr in LOOP:
            self._look_up("getattr", node, node.attr, frame, "{0}.{2} if type({0} := ", "is LoopContext")
        else:
            super().visit_Getattr(node, frame)

    @optimizeconst
    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        """`message['role']`."""
        if isinstance(node.arg, nodes.Const) and node.arg.value in FIELDS:
            self._look_up("getitem", node, node.arg.value, frame)
        else:
            super().visit_Getitem(node, frame)

    def _look_up(
        self,
        usual: str,
        node: nodes.Getattr | nodes.Getitem,
        name: str,
        frame: Frame,
        quick: str = "{0}[{1!r}] if type({0} := ",
        kind: str = "is dict and {1!r} in {0}",
    ) -> None:
        looked_in = f"{self.temporary_identifier()}_seen"
        names = (looked_in, name, name)
        self.write("(" + quick.format(*names))
        self.visit(node.node, frame)
        self.write(f") {kind.format(*names)} else environment.{usual}({looked_in}, {name!r}))")


def _is_of_transformers(tokenizer: Any, name: str) -> bool:
    """Whether a method is the library's, and no code that comes with a model."""
    return getattr(getattr(type(tokenizer), name, None), "__module__", "").startswith("transformers.")


def _is_byte_level(backend: Any) -> bool:
    """Whether each token stands for one byte of the text's NFC at least, and nothing is put before the text."""
    before = backend.pre_tokenizer.__getstate__() if backend.pre_tokenizer else b""
    plain = b'"ByteLevel"' in before and b'"add_prefix_space":true' not in before
    normal = backend.normalizer is None or isinstance(backend.normalizer, normalizers.NFC)
    return plain and normal and isinstance(backend.model, models.BPE) and not backend.model.byte_fallback
