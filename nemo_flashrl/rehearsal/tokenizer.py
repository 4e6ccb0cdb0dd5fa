"""The rehearsal's tokenizer: one token a word, words apart by single spaces; the text comes back as it was."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ("Q", ":", "get", "answer", "(", ")", ">", "k", "v", "!", *"0123456789")
PAD, END, UNKNOWN = "_", "<eos>", "<unk>"
ACTION_END = ")"  # the token that closes every action: the rehearsal's stop token


def make_tokenizer(context: int = 128) -> PreTrainedTokenizerFast:
    """A word-level tokenizer of 23 tokens; 23 does not split over two ranks, so vocabulary padding is rehearsed too.

    `context` is written into the tokenizer's configuration as the longest input.
    """
    words = [PAD, *WORDS, UNKNOWN]
    # END is an added token only: were it a word, an observation that spells it would turn into it.
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        model_max_length=context,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )
