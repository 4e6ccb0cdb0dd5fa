"""transformers' calls that every turn needs, without what it does around them: the same text, the same ids.

A chat template may show old messages otherwise when new ones come, as Qwen3's does with thoughts. So it is rendered
whole each turn, by code that does not send each `message.role` through Jinja's sandbox; unless its source shows that it
writes one message after another, and of each no more than its neighbours decide. Then its beginning and its end do.
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
        self._template: tuple[str, Callable[..., str], bool] | None = None  # its source, what renders it, is it local

    def render(self, messages: Sequence[Message]) -> str:
        """`apply_chat_template` with the generation prompt. Raises what the template raises."""
        tokenizer = self._tokenizer
        if not _is_of_transformers(tokenizer, "apply_chat_template"):
            return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return self._compiled()[1](messages=list(messages))

    def is_local(self) -> bool:
        """Whether messages between the first one and the last two make no difference to what follows these.

        If R is a conversation's first message and its last two, and the text of R with more messages begins with the
        text of R, then so does the text of the conversation with them, and what follows is the same; and vice versa.
        """
        return _is_of_transformers(self._tokenizer, "apply_chat_template") and self._compiled()[2]

    def _compiled(self) -> tuple[str, Callable[..., str], bool]:
        source = self._tokenizer.get_chat_template()
        if self._template is None or self._template[0] != source:
            environment = _compile_jinja_template(source).environment.overlay()
            environment.code_generator_class = _ShortLookups
            template = environment.from_string(source)
            template.globals = dict(template.globals)  # copied at each call, and slow to as the ChainMap that it is
            given = {"tools": None, "documents": None, "add_generation_prompt": True}
            render = functools.partial(template.render, given | self._tokenizer.special_tokens_map)
            self._template = source, render, _is_local(environment.parse(source))
        return self._template

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


def end_of_action(text: str, before: str, action: str) -> int | None:
    """Where the action ends in a rendered template that begins with `before`; None if it does not follow there.

    Templates trim a message or put blank lines around a tag: blanks may differ, since the sampled ids stay anyway.
    """
    if not text.startswith(before):
        return None
    if text.startswith(action, len(before)):
        return len(before) + len(action)
    position = len(before)
    for letter in "".join(action.split()):
        while position < len(text) and text[position].isspace():
            position += 1
        if not text.startswith(letter, position):
            return None
        position += 1
    for letter in action[len(action.rstrip()) :]:  # the blanks at its end, as far as the template kept them
        position += text.startswith(letter, position)
    return position


# What a local template may consist of: nothing that keeps a state from one round of its loop to the next.
_PLAIN = (
    *(nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.Assign, nodes.Name, nodes.Literal, nodes.Pair),
    *(nodes.BinExpr, nodes.UnaryExpr, nodes.Compare, nodes.Operand, nodes.Concat, nodes.CondExpr, nodes.Keyword),
    *(nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Call, nodes.Filter, nodes.Test),
)
_CALLED = ("raise_exception", "strftime_now")


def _is_local(template: nodes.Template) -> bool:
    """See `TokenizerCalls.is_local`; False where it cannot be seen.

    Such a template is what the first message decides, then a loop over `messages` that reads of others the first one
    and the neighbours alone, then what the first and the last message decide.
    """
    loops = [n for n, node in enumerate(template.body) if isinstance(node, nodes.For) and _is(node.iter, "messages")]
    if len(loops) != 1:
        return False
    loop, before, after = template.body[loops[0]], template.body[: loops[0]], template.body[loops[0] + 1 :]
    return (
        all(_reads_only(node, {"first"}) for node in before)
        and not (loop.test or loop.else_ or loop.recursive)
        and all(_reads_only(node, {"first", "next", "previous"}) for node in (loop.target, *loop.body))
        and all(_reads_only(node, {"first", "last"}) for node in after)
    )


def _reads_only(node: nodes.Node, places: set[str], not_in_first: bool = False) -> bool:
    """Whether `node` is plain and reads no message but those; the one before only where the loop's first round cannot.

    In the first round, `messages[loop.index0 - 1]` would be the last one.
    """
    if isinstance(node, nodes.Getitem) and _is(node.node, "messages"):
        place = _place(node.arg)
        return place in places and (place != "previous" or not_in_first)
    if isinstance(node, nodes.Getattr) and _is(node.node, "loop"):
        return node.attr in ("first", "last", "previtem", "nextitem")
    if isinstance(node, nodes.Compare) and _is_index(node.expr):
        return all(_is_zero(operand.expr) for operand in node.ops)
    if isinstance(node, nodes.And | nodes.Or):
        later = not_in_first or _surely_in_first(node.left, isinstance(node, nodes.Or))
        return _reads_only(node.left, places, not_in_first) and _reads_only(node.right, places, later)
    if isinstance(node, nodes.For):  # `loop` is another one inside
        places = set()
    return (
        isinstance(node, _PLAIN)
        and not (isinstance(node, nodes.Name) and node.name in ("messages", "loop"))
        and not (isinstance(node, nodes.For) and (node.test or node.recursive))
        and not (isinstance(node, nodes.Filter) and (node.name == "random" or node.node is None))
        and not (
            isinstance(node, nodes.Call) and not (isinstance(node.node, nodes.Getattr) or _is(node.node, *_CALLED))
        )
        and all(_reads_only(child, places, not_in_first) for child in node.iter_child_nodes())
    )


def _surely_in_first(node: nodes.Node, value: bool) -> bool:
    """Whether it is seen that an expression is true, or false, in the first round of a loop."""
    if isinstance(node, nodes.Not):
        return _surely_in_first(node.node, not value)
    if isinstance(node, nodes.And | nodes.Or):
        sides = [_surely_in_first(side, value) for side in (node.left, node.right)]
        return any(sides) if value == isinstance(node, nodes.Or) else all(sides)
    if isinstance(node, nodes.Compare) and _is_index(node.expr) and len(node.ops) == 1:
        return _is_zero(node.ops[0].expr) and node.ops[0].op in (("eq",) if value else ("ne", "gt"))
    return value and isinstance(node, nodes.Getattr) and _is(node.node, "loop") and node.attr == "first"


def _place(index: nodes.Expr) -> str:
    """Which message of a list it names, as seen from a round of the loop; "" where that is none of those we know."""
    if isinstance(index, nodes.Const) and index.value in (0, -1):
        return "first" if index.value == 0 else "last"
    if index == nodes.Neg(nodes.Const(1)):
        return "last"
    if isinstance(index, nodes.Add | nodes.Sub) and _is_index(index.left) and index.right == nodes.Const(1):
        return "next" if isinstance(index, nodes.Add) else "previous"
    return ""


def _is_index(node: nodes.Expr) -> bool:
    return isinstance(node, nodes.Getattr) and node.attr == "index0" and _is(node.node, "loop")


def _is_zero(node: nodes.Expr) -> bool:
    return isinstance(node, nodes.Const) and node.value == 0


def _is(node: nodes.Node, *names: str) -> bool:
    return isinstance(node, nodes.Name) and node.name in names
