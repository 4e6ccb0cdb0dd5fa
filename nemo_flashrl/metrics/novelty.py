"""Which of a trajectory's tokens say something new where a sentence is what says it: reworded, a claim counts once.

    The disk is full.    So full is the disk!    Key 4 holds 7.    Key 7 holds 4.
    new                  repeats                 new               new

    action tokens of a turn -> sentences, as spans of tokens -> each one's key, or its vector -> those said before

By words (`sentence_key`) a sentence repeats one of the same words, in whatever order and case and with whatever
punctuation and small words between them. Numbers keep their order, and with a sign of arithmetic or comparison in it a
sentence keeps all of its order. Synonyms and other forms of a word are new. An embedder finds those too: of what is new
by words, a sentence repeats an earlier new one whose vector is as close as `similarity`, the cosine.
"""

from __future__ import annotations

import asyncio
import copy
import re
import unicodedata
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from nemo_flashrl.plugins import load_function
from nemo_flashrl.records import Trajectory

Embed = Callable[[Sequence[str]], Any]  # N sentences -> what NumPy reads as float [N, D]
NGRAMS, SENTENCES = "ngrams", "sentences"
_END = re.compile(r"[.!?][\"')\]]{0,3}\s+|[。！？]\s*|\n\s*")  # a point inside 3.14 or file.py ends nothing
_BULLET = re.compile(r"\s*[-*•]\s+")
_WORD = re.compile(r"[0-9]+(?:[.,][0-9]+)*|[^\W\d_]+|\d+|[+*/=<>^%]|(?<![^\W\d_])-|-(?![^\W\d_])")
_SIGNS = frozenset("+*/=<>^%-")
_SMALL = re.compile(
    "an?|the|am|is|are|was|were|be|been|being|do|does|did|its?|this|that|these|those|there|here|i|we|you|of|in|on|at|to|"
    "for|by|with|from|as|into|and|but|so|thus|therefore|hence|then|also|now|just|ok|okay|which|who|what"
)
_BATCH, _MOST_TOKENS = 32, 256  # sentences at a time, and tokens of one that are looked at


class Novelty:
    """Marks the tokens of sentences that repeat an earlier one of the same trajectory.

    Args:
        tokenizer: has `encode` and `decode`.
        embed: sentences -> vectors; None compares them by their words alone.
        similarity: cosine from which two sentences say the same.
        enough: new tokens up to which nobody asks for fewer: a trajectory that has no more by its words alone is not
            embedded.
    """

    def __init__(
        self, tokenizer: Any, embed: Embed | None = None, similarity: float = 0.9, enough: float = 0.0
    ) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)  # one that another thread encodes with refuses to be used in two
        self._embed, self._similarity, self._enough = embed, similarity, enough
        anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
        before = len(self._text(anchor))  # a token's blank is kept where it is not the first one
        self._piece = lru_cache(maxsize=None)(lambda token: self._text([*anchor, token])[before:])
        self._thread = ThreadPoolExecutor(1, "novelty")

    async def __call__(self, trajectory: Trajectory) -> Trajectory:
        """As `measured`, one trajectory at a time in a thread, so that episodes run on."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.measured, trajectory)

    def measured(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with its `repeats`.

        Raises:
            ValueError: the embedder failed, or returned no vector for each sentence.
        """
        spans = [span for places in trajectory.turn_places for span in self._sentences(trajectory.token_ids, places)]
        texts = [self._text(trajectory.token_ids[span].tolist()) for span in spans]
        said, new = _said_in_words(texts)
        left = sum(len(span) for span, before in zip(spans, said, strict=True) if not before)
        if self._embed is not None and len(new) > 1 and left > self._enough:
            close = covered(self._vectors([texts[place] for place in new]), self._similarity)
            for place in np.array(new)[close].tolist():
                said[place] = True
        repeats = np.zeros(len(trajectory.token_ids), dtype=bool)
        for span in (span for span, before in zip(spans, said, strict=True) if before):
            repeats[span] = True
        return replace(trajectory, repeats=repeats)

    def _text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _sentences(self, token_ids: np.ndarray, places: np.ndarray) -> list[np.ndarray]:
        numbers = sentence_of_piece([self._piece(token) for token in token_ids[places].tolist()])
        return np.split(places, np.flatnonzero(np.diff(numbers)) + 1) if len(places) else []

    def _vectors(self, sentences: list[str]) -> np.ndarray:
        who = "the embedder (length_penalty.novelty)"
        try:
            vectors = np.asarray(self._embed(sentences), dtype=np.float64)
        except (Exception, SystemExit) as error:
            raise ValueError(f"{who} failed: {type(error).__name__}: {' '.join(str(error).split())}") from error
        if vectors.ndim != 2 or len(vectors) != len(sentences) or not vectors.shape[1]:
            shape = list(vectors.shape)
            raise ValueError(f"{who} returned shape {shape} for {len(sentences)} sentences: a vector each is needed")
        if not np.isfinite(vectors).all():
            raise ValueError(f"{who} returned NaN or infinity")
        return vectors

    def check(self) -> None:
        """Embed two sentences. Raises as `measured`."""
        if self._embed is not None:
            self._vectors(["The disk is full.", "Key 4 holds 7."])


def _said_in_words(texts: Sequence[str]) -> tuple[list[bool], list[int]]:
    """Whether each sentence has the words of an earlier one; the places of those that have words of their own."""
    seen: set[tuple[Any, ...]] = set()
    said, new = [False] * len(texts), []
    for place, key in enumerate(map(sentence_key, texts)):
        said[place] = key in seen
        if key and not said[place]:
            seen.add(key)
            new.append(place)
    return said, new


def sentence_of_piece(pieces: Sequence[str]) -> np.ndarray:
    """int64 [A]: the number of the sentence in which the first letter of each piece of one text stands.

    >>> sentence_of_piece(["Pi", " is", " 3", ".", "14", ".", " So", " what", "?\\n", "\\n", "Yes"]).tolist()
    [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2]
    """
    ends = [found.end() for found in _END.finditer("".join(pieces))]
    sizes = np.array([len(piece) for piece in pieces], dtype=np.int64)
    blanks = [0 if piece.isspace() else len(piece) - len(piece.lstrip()) for piece in pieces]
    return np.searchsorted(ends, sizes.cumsum() - sizes + np.array(blanks, dtype=np.int64), side="right")


def sentence_key(sentence: str) -> tuple[Any, ...]:
    """What two sentences that say the same in other words have in common; empty where there is no word.

    >>> sentence_key("The capital of France is Paris.") == sentence_key("paris: it's France's capital!")
    True
    >>> sentence_key("Paris isn't the capital.")
    (('capital', 'not', 'paris'), ())
    """
    if bullet := _BULLET.match(sentence):
        sentence = sentence[bullet.end() :]
    text = unicodedata.normalize("NFKC", sentence).casefold().replace("\u2019", "'")
    text = re.sub(r"n't\b", " not", re.sub(r"\bcan(?:not|'t)\b", "can not", text))
    parts = _WORD.findall(re.sub(r"'(?:s|re|m)\b", "", text))
    if not _SIGNS.isdisjoint(parts):
        return tuple(parts)
    numbers = tuple(part for part in parts if part[0].isdigit())
    words = [part for part in parts if not part[0].isdigit()]
    told = [word for word in words if not _SMALL.fullmatch(word)]
    words = told if told or numbers else words
    return (tuple(sorted(words)), numbers) if parts else ()


def covered(vectors: np.ndarray, similarity: float) -> np.ndarray:
    """bool [N]: those of float [N, D] whose cosine with an earlier one that is not covered itself is `similarity`.

    A vector of zeros is like none.
    """
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    units = vectors / np.where(lengths > 0, lengths, 1)
    kept, count, found = np.empty_like(units), 0, np.zeros(len(units), dtype=bool)
    for place, unit in enumerate(units):
        found[place] = bool((kept[:count] @ unit >= similarity - 1e-6).any())
        if not found[place]:
            kept[count] = unit
            count += 1
    return found


class FolderEmbedder:
    """A Hugging Face model on the CPU: the mean of its last hidden states over a sentence's tokens."""

    def __init__(self, folder: str) -> None:
        """
        Raises:
            ValueError: the folder holds no model and tokenizer that transformers can load, or lacks weights.
        """
        import torch
        from transformers import AutoModel, AutoTokenizer

        if not (Path(folder) / "config.json").is_file():
            raise ValueError("there is no config.json in it; name a Hugging Face model's folder")
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self._model, told = AutoModel.from_pretrained(
                folder, local_files_only=True, dtype=torch.float32, output_loading_info=True
            )
        except Exception as error:  # of whatever the files hold
            why = " ".join(str(error).split())[:500]
            raise ValueError(f"transformers cannot load it: {type(error).__name__}: {why}") from error
        missing = sorted(name for name in told["missing_keys"] if "pooler" not in name)
        if missing:
            raise ValueError(f"the checkpoint lacks {len(missing)} of the model's weights, {missing[0]} for one")
        self._model.eval()
        positions = getattr(self._model.config, "max_position_embeddings", _MOST_TOKENS + 2)
        self._most = min(_MOST_TOKENS, self._tokenizer.model_max_length, positions - 2)  # RoBERTa's begin at 2

    def __call__(self, sentences: Sequence[str]) -> np.ndarray:
        """float32 [N, D]."""
        import torch

        ids = self._tokenizer(list(sentences), truncation=True, max_length=self._most)["input_ids"]
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))  # little padding in a batch
        vectors: dict[int, np.ndarray] = {}
        for start in range(0, len(order), _BATCH):
            rows = order[start : start + _BATCH]
            tokens = torch.zeros(len(rows), max(1, *(len(ids[i]) for i in rows)), dtype=torch.int64)
            mask = torch.zeros_like(tokens)
            for row, i in enumerate(rows):
                tokens[row, : len(ids[i])] = torch.tensor(ids[i], dtype=torch.int64)
                mask[row, : len(ids[i])] = 1
            with torch.inference_mode():
                states = self._model(input_ids=tokens, attention_mask=mask).last_hidden_state
            means = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
            vectors.update(zip(rows, means.numpy(), strict=True))
        return np.stack([vectors[i] for i in range(len(ids))])


def load_novelty(name: str, similarity: float, tokenizer: Any, enough: float = 0.0) -> Novelty | None:
    """What `length_penalty.novelty` names; None for n-grams, which `repetition.py` counts without text.

    Raises:
        ValueError: `name` is neither, nor a folder with a model, nor the dotted path of a function.
    """
    if name == NGRAMS:
        return None
    if name == SENTENCES:
        return Novelty(tokenizer)
    folder = bool(name) and Path(name).is_dir()
    if "/" in name and not folder:
        raise ValueError("there is no such folder; name one with a Hugging Face model and its tokenizer")
    if "." not in name and not folder:
        raise ValueError(f"neither {NGRAMS} nor {SENTENCES}, nor the folder or the dotted path of an embedder")
    found = Novelty(tokenizer, FolderEmbedder(name) if folder else load_function(name), similarity, enough)
    found.check()
    return found
