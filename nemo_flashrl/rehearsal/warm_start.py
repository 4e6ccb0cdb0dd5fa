"""Makes the model that the rehearsal begins with: a tiny Qwen2 that knows the task's grammar but not its point.

    demonstrate -> 300 sloppy episodes -> supervised training on the action tokens -> a Hugging Face folder

From random weights reinforcement finds no reward at all; from here about one episode in five ends well.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from nemo_flashrl.environments.key_value_store import NUM_NAMES, Entry, Settings, Task, digits, make_task
from nemo_flashrl.rehearsal.tokenizer import ACTION_END, PAD, make_tokenizer

CONTEXT = 128  # the longest episode is 5 + 7 * 8 + 6 * 4 = 85 tokens
SLIP = 0.2  # the share of demonstrated actions with one digit replaced by a random one
# What lets reinforcement tell a pointer from a value within a hundred updates: with transformers' own 0.02 and 1e4 the
# attention of so small a model is flat at the start, most pairs of a head of 16 hardly turn within an episode, and the
# tool is chosen without a look at the observation, which ends at 30% success.
INITIAL_STD = 0.08
ROPE_BASE = 30.0
STEPS = 300
BATCH_SIZE = 16
LEARNING_RATE = 3e-3

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


def _train(model: Qwen2ForCausalLM, token_ids: torch.Tensor, mask: torch.Tensor, steps: int, seed: int) -> None:
    """Cross-entropy on the action tokens, mean over a minibatch's tokens, AdamW, learning rate falling to 0."""
    generator = torch.Generator().manual_seed(seed)
    lengths = 1 + (mask * torch.arange(mask.shape[1])).amax(1)  # up to the last action token
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / max(steps, 1))
    model.train()
    for _ in range(steps):
        rows = torch.randint(len(token_ids), (BATCH_SIZE,), generator=generator)
        width = int(lengths[rows].max())
        ids, said = token_ids[rows, :width], mask[rows, :width]
        # Padding is on the right and attention is causal, so no action token sees it: no attention mask is needed.
        logits = model(input_ids=ids[:, :-1]).logits
        loss = functional.cross_entropy(logits[said[:, 1:]], ids[:, 1:][said[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


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
