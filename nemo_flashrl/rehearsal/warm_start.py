"""Makes the model that the rehearsal begins with: a tiny Qwen2 that knows the task's grammar but not its point.

    demonstrate -> 300 sloppy episodes -> supervised training on the action tokens -> a Hugging Face folder

From random weights reinforcement finds no reward at all; from here about one episode in five ends well.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from nemo_flashrl.environments.key_value_store import NUM_NAMES, Entry, Settings, Task, digits, make_task

WORDS = ("Q", ":", "get", "answer", "(", ")", ">", "k", "v", "!", *"0123456789")
PAD, END, UNKNOWN = "_", "<eos>", "<unk>"
ACTION_END = ")"  # the token that closes every action: the rehearsal's stop token

CONTEXT = 128  # the longest episode is 5 + 7 * 8 + 6 * 4 = 85 tokens
SLIP = 0.2  # the share of demonstrated actions with one digit replaced by a random one
STEPS = 200
BATCH_SIZE = 16
LEARNING_RATE = 3e-3
# The loss sees logits divided by this, so at temperature 1 the model slips less than the demonstrator, whose own
# success is 19%.
SHARPNESS = 1.3
# What lets reinforcement tell a pointer from a value within fifty updates. The demonstrator picks its tool without a
# look at what it was shown, so the supervised data does not teach the model to look, and a policy that does not look
# settles on "get once, then answer", 33% success, for a hundred updates or for good. Hence each head begins by looking
# this many tokens back; and with transformers' own 0.02 and 1e4 the attention of so small a model is flat at the start
# and most pairs of a head of 16 hardly turn within an episode.
LOOK_BACK = (1, 2, 3, 4)
LOOK_STRENGTH = 2.5
INITIAL_STD = 0.05
ROPE_BASE = 100.0

Segment = tuple[str, bool]  # a piece of an episode's text, and whether the demonstrator said it


def make_warm_start(
    folder: str | Path,
    seed: int = 0,
    *,
    demonstrations: int = 300,
    steps: int = STEPS,
    tie_word_embeddings: bool = False,
) -> Path:
    """Train the model and write it to `folder`: config, safetensors, tokenizer, generation config.

    A few seconds of one core; the same arguments give the same bytes, and torch's global random state and thread
    count are left as they were. `steps=0` leaves the random initialisation.

    Raises:
        ValueError: `folder` exists and holds something.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"the warm start's folder {folder} exists and is not empty: name another, or remove it")
    tokenizer = make_tokenizer(CONTEXT)
    with _seeded_single_thread(seed):
        model = Qwen2ForCausalLM(_model_config(tokenizer, tie_word_embeddings))
        _look_back(model)
        _train(model, *_demonstrations(tokenizer, demonstrations, seed), steps, seed)
    ends = {"eos_token_id": tokenizer.convert_tokens_to_ids(ACTION_END), "pad_token_id": tokenizer.pad_token_id}
    # An action ends at its closing bracket; no beginning token, and no truncated sampling.
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, max_new_tokens=8, **ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def demonstrate(task: Task, rng: random.Random, max_calls: int = 6) -> list[Segment]:
    """One episode of a sloppy demonstrator, who copies what was last said but picks the tool by coin flip.

    >>> demonstrate(task, rng)
    [("Q k 2 9 :", False), ("get ( k 2 9 )", True), ("> k 4 0", False), ("answer ( v 4 0 )", True)]
    """
    segments: list[Segment] = [(task.prompt, False)]
    shown = task.key
    for call in range(max_calls + 1):
        get = call == 0 or (call < max_calls and rng.random() < 0.5)
        number = _slip(shown, rng)
        segments.append((f"get ( k {digits(number)} )" if get else f"answer ( v {digits(number)} )", True))
        if not get:
            break
        entry: Entry | None = task.store.get(number)
        assert entry is not None, "the demonstrator plays full stores only"
        segments.append((f"> {entry.text}", False))
        shown = entry.number
    return segments


def _slip(number: int, rng: random.Random) -> int:
    """`number`, with probability SLIP one of its two digits replaced by a random digit (which may be the same)."""
    if rng.random() >= SLIP:
        return number
    tens, ones = divmod(number, 10)
    digit = rng.randrange(10)
    return 10 * digit + ones if rng.random() < 0.5 else 10 * tens + digit


def _demonstrations(tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids int64 [count, longest], padded on the right, and the mask of action tokens, bool."""
    rng = random.Random(seed)
    # Tasks of their own: the seed is one that no training set is likely to be given.
    settings = Settings(entries=NUM_NAMES, num_tasks=count, seed=2**31 + seed)
    rows: list[tuple[list[int], list[bool]]] = []
    for i in range(count):
        ids: list[int] = []
        said: list[bool] = []
        for text, is_action in demonstrate(make_task(settings, i), rng):
            piece = tokenizer(text, add_special_tokens=False).input_ids
            ids += piece
            said += [is_action] * len(piece)
        rows.append((ids, said))
    longest = max(len(ids) for ids, _ in rows)
    pad = tokenizer.convert_tokens_to_ids(PAD)
    token_ids = torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in rows])
    mask = torch.tensor([said + [False] * (longest - len(said)) for _, said in rows])
    return token_ids, mask


def _model_config(tokenizer: PreTrainedTokenizerBase, tie_word_embeddings: bool) -> Qwen2Config:
    """2 layers of width 64, 107,968 parameters; heads, key-value heads and MLP all split over two ranks."""
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=208,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tie_word_embeddings,
        attention_dropout=0.0,
        initializer_range=INITIAL_STD,
        rope_theta=ROPE_BASE,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(ACTION_END),
        pad_token_id=tokenizer.pad_token_id,
    )


def _look_back(model: Qwen2ForCausalLM) -> None:
    """Set the query and key biases so that head h of each layer attends LOOK_BACK[h] tokens back, whatever they are.

    Rotary attention turns a key by its distance: a key bias u and the same u turned back by the distance as query bias
    match best exactly there. Only the faster half of the frequencies tells neighbours apart.
    """
    config = model.config
    half = config.hidden_size // config.num_attention_heads // 2
    frequencies = config.rope_theta ** (-torch.arange(half) / half)
    strength = torch.where(torch.arange(half) < half // 2, LOOK_STRENGTH, 0.0)
    key = torch.cat([strength, torch.zeros(half)])
    queries = [
        torch.cat([strength * torch.cos(d * frequencies), -strength * torch.sin(d * frequencies)]) for d in LOOK_BACK
    ]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.copy_(key.repeat(config.num_key_value_heads))
            layer.self_attn.q_proj.bias.copy_(torch.cat(queries))


def _train(model: Qwen2ForCausalLM, token_ids: torch.Tensor, mask: torch.Tensor, steps: int, seed: int) -> None:
    """Cross-entropy on the action tokens with AdamW; the learning rate rises for 20 steps, then falls to 0."""
    generator = torch.Generator().manual_seed(seed)
    lengths = 1 + (mask * torch.arange(mask.shape[1])).amax(1)  # up to the last action token
    tokens_per_batch = mask.sum() / len(mask) * BATCH_SIZE
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 20) * (1 - step / max(steps, 1))
    )
    batches: list[torch.Tensor] = []
    model.train()
    for _ in range(steps):
        batches = batches or _batches_of_like_length(lengths, generator)
        rows = batches.pop()
        width = int(lengths[rows].max())
        ids, said = token_ids[rows, :width], mask[rows, :width]
        # Padding is on the right and attention is causal, so no action token sees it: no attention mask is needed.
        logits = model(input_ids=ids[:, :-1]).logits[said[:, 1:]]
        loss = functional.cross_entropy(logits / SHARPNESS, ids[:, 1:][said[:, 1:]], reduction="sum")
        optimizer.zero_grad()
        # Divided by the same number in every batch: a mean over each would favour short episodes, early answers.
        (loss / tokens_per_batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


def _batches_of_like_length(lengths: torch.Tensor, generator: torch.Generator) -> list[torch.Tensor]:
    """One epoch's rows in batches, episodes of about one length together: half the padding is half the time."""
    jitter = 9 * torch.rand(len(lengths), generator=generator)
    batches = (lengths + jitter).argsort().split(BATCH_SIZE)
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


@contextmanager
def _seeded_single_thread(seed: int):
    """One thread, because sums over threads are not bit-equal from machine to machine; a fresh random state."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


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
