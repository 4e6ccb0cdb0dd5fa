"""What of a trajectory is new where a sentence is what says it: words, vectors, a folder's model, the run around."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from doubles import GET, TOKENIZER, ScriptedEngine, ScriptedEnvironment, collector, text_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from nemo_flashrl.config import load
from nemo_flashrl.data.collate import truncate
from nemo_flashrl.environments.environment import StepResult
from nemo_flashrl.metrics.novelty import FolderEmbedder, Novelty, covered, sentence_key, sentence_of_piece
from nemo_flashrl.metrics.repetition import new_tokens
from nemo_flashrl.metrics.trajectory_log import trajectory_row
from nemo_flashrl.preflight.prepare import prepare
from nemo_flashrl.records import Batch, Trajectory

CLAIM = ("The capital of France is Paris. ", "Paris: it is France's capital! ", "So, capital of France: Paris it is. ")
SAME = [  # the first says what the others say
    ("The capital of France is Paris.", "paris is the Capital of france!", "It is Paris, France's capital."),
    ("The disk isn't full.", "- So the disk is not full", "FULL the disk is not, then."),
    ("Key 40 holds the value 17.", "key 40 — it holds value 17"),
    ("We can't read it.", "It you cannot read."),
    ("3 + 4 = 7", "- 3 + 4 = 7!"),
]
OTHER = [  # each says something else
    ("The disk is full.", "The disk is not full.", "The disks are full.", "Is the full disk 2?"),
    ("key 29 points at key 40", "key 40 points at key 29"),
    ("x > y", "y > x"),
    ("7 - 4 = 3", "4 - 7 = 3", "7 + 4 = 3"),
    ("is it?", "was there?"),
    ("Version 1.5", "Version 15", "Version 5.1"),
]


def said(tokenizer: PreTrainedTokenizerFast, *turns: str) -> Trajectory:
    """A prompt of one token, then turns of text with a token of observation after each."""
    tokens, owner = [0], [-1]
    for number, text in enumerate(turns):
        own = tokenizer.encode(text, add_special_tokens=False)
        tokens += [*own, 0]
        owner += [number] * len(own) + [-1]
    mask = np.array(owner) >= 0
    return Trajectory(
        prompt_index=0, group=0, token_ids=np.array(tokens), action_mask=mask, behavior_logprobs=np.zeros(len(mask)),
        versions=np.zeros(len(mask), np.int32), reward=0.0, turns=len(turns), end_reason="done", failed=True,
        turn_of_token=np.array(owner, np.int32),
    )  # fmt: skip


def text_of_new(tokenizer: PreTrainedTokenizerFast, trajectory: Trajectory) -> str:
    return tokenizer.decode(trajectory.token_ids[trajectory.action_mask & ~trajectory.repeats].tolist())


def stand_in(sentences: Sequence[str]) -> np.ndarray:
    """Cosines by hand: "a" and "b" 0.8, "b" and "c" 0.96, "a" and "c" 0.6; all else is at a right angle to them."""
    known = {"a": (1, 0, 0), "b": (0.8, 0.6, 0), "c": (0.6, 0.8, 0)}
    return np.array([known.get(sentence.strip(" .\n").lower(), (0, 0, 1)) for sentence in sentences], dtype=np.float32)


def test_a_claim_reworded_three_ways_counts_once() -> None:
    """In one turn or in three; n-grams count every rewording."""
    tokenizer = text_tokenizer()
    for turns in (("".join(CLAIM) + "Rome is old.",), (*CLAIM, "Rome is old.")):
        trajectory = said(tokenizer, *turns)
        measured = Novelty(tokenizer).measured(trajectory)
        assert text_of_new(tokenizer, measured) == CLAIM[0] + "Rome is old."
        assert new_tokens(measured) == len(CLAIM[0]) + len("Rome is old.")
        assert new_tokens(trajectory) > len(CLAIM[0]) + len("Rome is old.") + 20  # as n-grams have it


@pytest.mark.parametrize("sentences", SAME)
def test_what_says_the_same(sentences: tuple[str, ...]) -> None:
    assert len({sentence_key(sentence) for sentence in sentences}) == 1


@pytest.mark.parametrize("sentences", OTHER)
def test_what_says_something_else(sentences: tuple[str, ...]) -> None:
    assert len({sentence_key(sentence) for sentence in sentences}) == len(sentences)


def test_a_line_without_a_word_repeats_nothing() -> None:
    tokenizer = text_tokenizer()
    assert sentence_key(" ...\n") == ()
    trajectory = Novelty(tokenizer).measured(said(tokenizer, "}\n}\n}\nend\nend\n", ""))
    assert text_of_new(tokenizer, trajectory) == "}\n}\n}\nend\n"


def test_sentences_are_found_in_pieces() -> None:
    pieces = ["Pi", " is", " 3", ".", "14", ".", " So", " what", "?\n", "\n", "Yes", "。", "Non", ' ("no."', ")  ", "Q"]
    assert sentence_of_piece(pieces).tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 3, 4]
    started = time.perf_counter()
    for degenerate in (["."] * 32_000, ["\n"] * 32_000, [" " * 32_000], ["- "] * 16_000, ['."'] * 16_000):
        sentence_of_piece(degenerate)
        sentence_key("".join(degenerate))
    assert time.perf_counter() - started < 5  # linear: milliseconds; a backtracking pattern takes minutes


def test_a_tokenizer_that_drops_the_first_blank_loses_no_sentence() -> None:
    """SentencePiece's decode a lone " Rome" as "Rome": joined, the text would have no blank after its points."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(
        [*CLAIM, "a Rome is old."] * 9, trainers.BpeTrainer(vocab_size=300, show_progress=False)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    rome = tokenizer.encode("Rome is old.", add_special_tokens=False)
    assert tokenizer.decode(rome[:1])[0] == "R"
    trajectory = said(tokenizer, f"{CLAIM[0]}Rome is old. {CLAIM[1]}Rome is old.")
    measured = Novelty(tokenizer).measured(trajectory)
    assert text_of_new(tokenizer, measured) == f"{CLAIM[0]}Rome is old."


def test_vectors_by_hand() -> None:
    """A sentence that is covered covers nothing itself: b goes with a, and c, as close to b, is not as close to a."""
    tokenizer = text_tokenizer()
    for similarity, new in ((0.81, "a. b. "), (0.8, "a. c. "), (0.6, "a. "), (0.97, "a. b. c. ")):
        trajectory = Novelty(tokenizer, stand_in, similarity).measured(said(tokenizer, "a. b. c. B! A? "))
        # "a" alone is a small word and has a key all the same; B and A repeat by their words
        assert text_of_new(tokenizer, trajectory) == new
    assert covered(np.zeros((3, 2)), 0.5).tolist() == [False] * 3


def test_only_what_is_too_long_by_its_words_is_embedded() -> None:
    """Of "a. b. A! " six tokens are new by words: with a limit of 6 its penalty is 0 whatever b says."""
    tokenizer, asked = text_tokenizer(), []

    def embed(sentences: Sequence[str]) -> np.ndarray:
        asked.append([sentence.strip() for sentence in sentences])
        return stand_in(sentences)

    for enough, new in ((6, "a. b. "), (5, "a. ")):
        trajectory = Novelty(tokenizer, embed, 0.8, enough).measured(said(tokenizer, "a. b. A! "))
        assert text_of_new(tokenizer, trajectory) == new
    assert asked == [["a.", "b."]]


def test_vectors_against_a_plain_reference() -> None:
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(6, 16))
    vectors = centres[rng.integers(0, 6, 60)] + rng.normal(size=(60, 16)) * 0.5
    for similarity in (0.5, 0.8, 0.95):
        kept: list[int] = []
        for place in range(60):
            cosines = [
                sum(vectors[place] * vectors[other]) / (sum(vectors[place] ** 2) * sum(vectors[other] ** 2)) ** 0.5
                for other in kept
            ]
            if not any(cosine >= similarity for cosine in cosines):
                kept.append(place)
        assert np.flatnonzero(~covered(vectors, similarity)).tolist() == kept
        assert 6 <= len(kept) < 60 or similarity == 0.95


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random BERT and a tokenizer trained on the claims."""
    out = tmp_path_factory.mktemp("embedder")
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=90, special_tokens=special, show_progress=False)
    backend.train_from_iterator(CLAIM, trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]").save_pretrained(out)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=len(backend.get_vocab()), max_position_embeddings=42, **sizes)).save_pretrained(out)
    return out


def test_a_folder_s_model_means_over_a_sentence_s_tokens(folder: Path) -> None:
    """In batches of mixed lengths as alone, one cut at the model's 40 positions."""
    embed, sentences = FolderEmbedder(str(folder)), [*CLAIM, "Paris", "Paris " * 90] * 9
    vectors = embed(sentences)
    model, tokenizer = BertModel.from_pretrained(folder).eval(), PreTrainedTokenizerFast.from_pretrained(folder)
    for sentence, vector in list(zip(sentences, vectors, strict=True))[:5]:
        ids = torch.tensor([tokenizer.encode(sentence)[:40]])
        with torch.no_grad():
            right = model(ids).last_hidden_state[0].double().mean(0)
        np.testing.assert_allclose(vector, right, rtol=0, atol=1e-5)
    np.testing.assert_allclose(vectors[:5], vectors[-5:], rtol=0, atol=1e-5)


def test_a_folder_s_model_finds_what_is_close(folder: Path) -> None:
    """The weights are random, so the cosines are its own: just below one of them two sentences are the same."""
    tokenizer, embed = text_tokenizer(), FolderEmbedder(str(folder))
    first, second = embed([CLAIM[0], "Rome is old. "]).astype(np.float64)
    cosine = first @ second / np.linalg.norm(first) / np.linalg.norm(second)
    for similarity, new in ((cosine - 1e-4, CLAIM[0]), (cosine + 1e-4, f"{CLAIM[0]}Rome is old. ")):
        trajectory = said(tokenizer, f"{CLAIM[0]}Rome is old. {CLAIM[1]}")
        measured = Novelty(tokenizer, embed, float(similarity)).measured(trajectory)
        assert text_of_new(tokenizer, measured) == new


def test_what_cannot_be_loaded_is_refused_before_a_model_is_built(warm_start, folder, tmp_path) -> None:
    """In one line with the setting; what can be loaded is."""
    damaged, empty = tmp_path / "damaged", tmp_path / "empty"
    empty.mkdir()
    damaged.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (damaged / name).write_bytes((folder / name).read_bytes())
    (damaged / "model.safetensors").write_bytes(b"")

    def of(novelty: str):
        given = ("coefficient=0.1", "limit=9", "unit=new_tokens", f"novelty={novelty}")
        settings = [f"output={tmp_path / 'run'}", f"model.path={warm_start}", *(f"length_penalty.{s}" for s in given)]
        return load("rehearsal", settings)

    for novelty, told in (
        ("sentence", "neither ngrams nor sentences, nor the folder or the dotted path of an embedder"),
        (tmp_path / "nowhere", "there is no such folder"),
        (empty, "there is no config.json in it"),
        (damaged, "transformers cannot load it: (SafetensorError|OSError)"),
        ("no_such_module.embed", "no module 'no_such_module' can be imported"),
        ("test_novelty.nothing", "is no function"),
        ("test_novelty.raising", r"the embedder \(length_penalty.novelty\) failed: KeyError: 'model'"),
        ("test_novelty.flat", r"returned shape \[2\] for 2 sentences: a vector each is needed"),
        ("test_novelty.infinite", "returned NaN or infinity"),
        ("test_novelty.exiting", r"failed: SystemExit: 0"),
        ("test_novelty.narrow", r"returned shape \[2, 0\] for 2 sentences"),
        ("", "neither ngrams nor sentences"),
    ):
        with pytest.raises(ValueError, match=told) as refused:
            prepare(of(str(novelty)), 1)
        assert str(refused.value).startswith(f"length_penalty.novelty='{novelty}': ")
        assert "\n" not in str(refused.value)
    for novelty in ("sentences", str(folder), "test_novelty.stand_in"):
        assert isinstance(prepare(of(novelty), 1).novelty, Novelty)
    assert prepare(of("ngrams"), 1).novelty is None


def raising(sentences: Sequence[str]) -> np.ndarray:
    raise KeyError("model")


def exiting(sentences: Sequence[str]) -> np.ndarray:
    raise SystemExit(0)


def narrow(sentences: Sequence[str]) -> np.ndarray:
    return np.ones((len(sentences), 0))


def flat(sentences: Sequence[str]) -> np.ndarray:
    return np.ones(len(sentences))


def infinite(sentences: Sequence[str]) -> np.ndarray:
    return np.full((len(sentences), 2), np.inf)


def test_a_checkpoint_without_all_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    model = BertModel.from_pretrained(folder)
    state = {name: value for name, value in model.state_dict().items() if "layer.1.output.dense" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match="lacks 2 of the model's weights, encoder.layer.1.output.dense.bias for one"):
        FolderEmbedder(str(tmp_path))


def test_episodes_run_on_while_one_is_measured() -> None:
    """Each measurement waits for the event loop to do something: it would wait for ever on the loop's own thread."""
    played, at_a_time, most = threading.Event(), [], []

    class Waiting(Novelty):
        def measured(self, trajectory: Trajectory) -> Trajectory:
            at_a_time.append(trajectory)
            most.append(len(at_a_time))
            assert played.wait(60)
            measured = super().measured(trajectory)
            at_a_time.remove(trajectory)
            return measured

    source = collector(
        ScriptedEngine(GET), lambda: ScriptedEnvironment([StepResult(), StepResult(done=True)]), batch_size=4,
        novelty=Waiting(TOKENIZER),
    )  # fmt: skip

    async def run() -> Batch:
        collecting = asyncio.create_task(source.collect(0))
        while not most:
            await asyncio.sleep(0.001)
        played.set()
        return await collecting

    batch = asyncio.run(run())
    assert most == [1] * 4  # one at a time
    for trajectory in batch.trajectories:  # the second `get` is the first one again
        assert new_tokens(trajectory) == len(GET) == trajectory.action_count / 2


def test_what_is_measured_is_cut_and_written_with_its_trajectory() -> None:
    tokenizer = text_tokenizer()
    trajectory = Novelty(tokenizer).measured(said(tokenizer, "Rome is old. Old is Rome."))
    assert (trajectory.action_count, new_tokens(trajectory)) == (25, 13)
    cut = truncate(trajectory, 1 + 20)
    assert (cut.action_count, new_tokens(cut)) == (20, 13)
    assert trajectory_row(trajectory, 1, 0, 0.0)["new_tokens"] == 13
    assert "new_tokens" not in trajectory_row(replace(trajectory, repeats=None), 1, 0, 0.0)
