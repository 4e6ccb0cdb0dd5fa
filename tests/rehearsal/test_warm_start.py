"""The rehearsal's tokenizer, its demonstrator and the model that it begins with."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path

import pytest
import torch
from doubles import STOP
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from nemo_flashrl.engines import TransformersEngine
from nemo_flashrl.environments.key_value_store import KeyValueStore, Settings, digits, make_task
from nemo_flashrl.records import Sampling
from nemo_flashrl.rehearsal.warm_start import LOOK_BACK, demonstrate, make_tokenizer, make_warm_start
from nemo_flashrl.rollout.episode import Limits
from nemo_flashrl.rollout.metrics import success_rate
from nemo_flashrl.rollout.player import evaluate


def test_text_comes_back_from_a_saved_tokenizer(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "Q k 2 9 : get ( k 2 9 ) > k 4 0 answer ( v 1 7 ) > ! 3 5 6 8 _"
    token_ids = tokenizer(text).input_ids
    assert len(token_ids) == len(text.split())
    assert tokenizer.decode(token_ids) == text
    assert len(tokenizer) == 23
    assert tokenizer.unk_token_id not in token_ids
    assert tokenizer("get nothing").input_ids[1] == tokenizer.unk_token_id


def test_the_demonstrator_is_as_sloppy_as_promised() -> None:
    """Rates over 4000 episodes; 0.2 * 0.9 of the actions differ from what was shown, for a digit may slip to itself."""
    rng = random.Random(1)
    slips = actions = gets = flips = solved = 0
    for i in range(4000):
        task = make_task(Settings(seed=8), i)
        segments = demonstrate(task, rng)
        assert segments[0] == (task.prompt, False)
        assert [said for _, said in segments] == [i % 2 == 1 for i in range(len(segments))]
        shown = digits(task.key)
        for place, (text, said) in enumerate(segments[1:], start=1):
            if not said:
                asked = int("".join(segments[place - 1][0].split()[3:5]))
                assert text == f"> {task.store[asked].text}"
                shown = text[4:]
                continue
            assert re.fullmatch(r"get \( k \d \d \)|answer \( v \d \d \)", text)
            said_digits = text.split()[3:5]
            wrong = sum(a != b for a, b in zip(said_digits, shown.split(), strict=True))
            assert wrong <= 1
            slips, actions = slips + wrong, actions + 1
            if 1 < place < 13:
                flips, gets = flips + 1, gets + text.startswith("get")
        assert segments[1][0].startswith("get")
        assert segments[-1][0].startswith("answer")
        solved += segments[-1][0] == f"answer ( v {digits(task.answer)} )"
    assert slips / actions == pytest.approx(0.18, abs=0.012)
    assert gets / flips == pytest.approx(0.5, abs=0.02)
    assert solved / 4000 == pytest.approx(0.19, abs=0.025)


def test_heads_begin_by_looking_back(tmp_path: Path) -> None:
    folder = make_warm_start(tmp_path / "model", steps=0)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    tokens = torch.randint(0, 23, (64, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        layers = model(input_ids=tokens, output_attentions=True).attentions  # each [64, heads, query, key]
    for attention in layers:
        by_distance = attention[:, :, 20, :21].mean(0).flip(-1)  # [heads, distance]
        assert by_distance.argmax(-1).tolist() == list(LOOK_BACK)
        assert by_distance.max(-1).values.min() > 0.25  # a flat head gives 0.05


def test_the_folder_is_a_whole_checkpoint(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    folder = make_warm_start(tmp_path / "model", seed=3, steps=2)
    assert torch.equal(torch.get_rng_state(), before)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert sum(p.numel() for p in model.parameters()) == 107_968
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(folder)) == 23
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight
    assert GenerationConfig.from_pretrained(folder).eos_token_id == STOP
    tied = AutoModelForCausalLM.from_pretrained(make_warm_start(tmp_path / "tied", steps=2, tie_word_embeddings=True))
    assert sum(p.numel() for p in tied.parameters()) == 107_968 - 23 * 64


def test_the_seed_fixes_every_byte(tmp_path: Path) -> None:
    files = [
        make_warm_start(tmp_path / name, seed, steps=3) / "model.safetensors"
        for name, seed in [("a", 0), ("b", 0), ("c", 1)]
    ]
    first, again, other = (file.read_bytes() for file in files)
    assert first == again
    assert first != other


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ValueError, match=f"{tmp_path} exists and is not empty"):
        make_warm_start(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("seed", [0, 1])
def test_it_solves_one_in_five(warm_start: Path, tmp_path: Path, seed: int) -> None:
    """The promise is 19 to 27%; the standard deviation of 600 episodes is 1.7%. Random weights solve none."""
    engine = TransformersEngine(make_warm_start(tmp_path / "model", seed) if seed else warm_start)
    settings = Settings(seed=100 + seed, num_tasks=600)
    trajectories = asyncio.run(
        evaluate(
            engine,
            lambda: KeyValueStore(settings),
            KeyValueStore.tasks(settings),
            make_tokenizer(),
            Limits(max_context=128),
            Sampling(max_tokens=8, stop_token_ids=(STOP,)),
            max_in_flight=600,
        )
    )
    assert 0.18 <= success_rate(trajectories) <= 0.29
    # Most of what it says is an action: what is left to learn is when to say which.
    assert sum(t.info["outcome"] == "malformed" for t in trajectories) < 30
