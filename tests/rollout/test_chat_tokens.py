"""Ids of a conversation against transformers: the whole rendered template, encoded at once."""

from __future__ import annotations

import asyncio
import functools
import json
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conversations import play, rendered, sampled
from doubles import ScriptedEngine, ScriptedEnvironment
from tiny import write_model
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from nemo_flashrl.config import RunConfig, load
from nemo_flashrl.engines.sglang import SGLangDialect
from nemo_flashrl.engines.transformers import TransformersEngine
from nemo_flashrl.engines.vllm import VLLMDialect
from nemo_flashrl.environments.environment import StepResult
from nemo_flashrl.preflight.model import warn_of_text
from nemo_flashrl.records import Sampling, Trajectory
from nemo_flashrl.rollout.chat_tokens import Codec
from nemo_flashrl.rollout.episode import Limits, run_episode
from nemo_flashrl.rollout.from_config import episode_sampling
from nemo_flashrl.rollout.metrics import rollout_metrics
from nemo_flashrl.rollout_server.serve import ServeOptions, command

CORPUS = [
    "[INST] What is it? [/INST] It is lower than 42. higher, lower",
    "<|user|> <|assistant|>\n guess the number\n\n",
]
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for m in messages %}{% if m.role in ('user', 'system', 'assistant') %}"
    "{{ '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
PHI_3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
GLM = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA_3 = (
    "{% set roles = {'tool': 'ipython'} %}{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + roles.get(m.role, m.role) + '<|end_header_id|>\\n\\n' }}"
    "{{ m.content | tojson if m.role == 'tool' else m.content | trim }}{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)


@functools.cache
def trained() -> dict[str, Any]:
    """Vocabulary and merges of a SentencePiece-like BPE model with byte fallback."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"]))
    model = json.loads(backend.to_str())["model"]
    vocab = model["vocab"] | {f"<0x{b:02X}>": len(model["vocab"]) + b for b in range(256)}
    return {"vocab": vocab, "merges": [tuple(pair) for pair in model["merges"]]}


def sentencepiece(kind: str, template: str) -> PreTrainedTokenizerFast:
    """As LlamaTokenizerFast: "legacy" puts a blank before every stretch of text, "first" before the first alone."""
    backend = Tokenizer(models.BPE(**trained(), unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if kind == "legacy":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with(backend, template, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def byte_level(template: str, **special: Any) -> PreTrainedTokenizerFast:
    """As Llama 3's and Qwen's: a byte-level BPE that joins blanks and line breaks."""
    backend = Tokenizer(models.BPE())
    words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS * 3, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    return _with(backend, template, **special)


def _with(backend: Tokenizer, template: str, more: tuple = (), **special: Any) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)
    tokenizer.add_special_tokens({"additional_special_tokens": list(more)})
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("observation", ["higher", " higher", "\n\nhigher\n", "2 \u00e9", "higher than 42."])
@pytest.mark.parametrize("template", [MISTRAL, ZEPHYR])
@pytest.mark.parametrize("kind", ["legacy", "first"])
def test_a_sentencepiece_conversation_is_that_of_transformers(kind: str, template: str, observation: str) -> None:
    tokenizer = sentencepiece(kind, template)
    action = [*sampled(tokenizer, "lower 42"), tokenizer.eos_token_id]
    answers = [StepResult(observation), StepResult("lower")]
    _, requests = play(tokenizer, action, (tokenizer.eos_token_id,), *answers)
    assert requests == [
        rendered(tokenizer, "What is it?"),
        rendered(tokenizer, "What is it?", "lower 42", observation),
        rendered(tokenizer, "What is it?", "lower 42", observation, "lower 42", "lower"),
    ]


@pytest.mark.parametrize("kind", ["legacy", "first"])
def test_llama_2_keeps_the_policys_own_end(kind: str) -> None:
    """The template writes a blank before </s> that the policy did not sample, and ends no turn twice."""
    tokenizer = sentencepiece(kind, LLAMA_2)
    blank, end = tokenizer.convert_tokens_to_ids(["\u2581", "</s>"])
    action = sampled(tokenizer, "lower 42")
    assert action[-1] == blank
    _, requests = play(tokenizer, [*action[:-1], end], (end,), StepResult("higher"))
    whole = rendered(tokenizer, "What is it?", "lower 42", "higher")
    place = whole.index(end)
    assert requests[1] == whole[: place - 1] + whole[place:]


@pytest.mark.parametrize("kind", ["legacy", "first"])
def test_special_tokens_spelt_in_a_sentencepiece_conversation_stay_text(kind: str) -> None:
    tokenizer = sentencepiece(kind, MISTRAL)
    end = tokenizer.eos_token_id
    action = [*sampled(tokenizer, "lower"), end]
    _, requests = play(tokenizer, action, (end,), StepResult("it </s> is"))
    assert requests[1].count(end) == 1
    text = tokenizer.decode(rendered(tokenizer, "What is it?", "lower", "it XX is"))
    assert tokenizer.decode(requests[1]) == text.replace("XX", "</s>")


@pytest.mark.parametrize("observation", ["higher", "\n\nhigher", "  higher \n"])
def test_byte_level_line_breaks_join_as_in_transformers(observation: str) -> None:
    tokenizer = byte_level(ZEPHYR, eos_token="</s>")
    action = [*sampled(tokenizer, "lower 42"), tokenizer.eos_token_id]
    _, requests = play(tokenizer, action, (tokenizer.eos_token_id,), StepResult(observation))
    assert requests[1] == rendered(tokenizer, "What is it?", "lower 42", observation)


def test_an_end_token_that_takes_the_blanks_after_it() -> None:
    ends = (AddedToken("<|end|>", rstrip=True, special=True),)
    tokenizer = byte_level(PHI_3, eos_token="<|endoftext|>", more=ends)
    action = [*sampled(tokenizer, "lower"), tokenizer.convert_tokens_to_ids("<|end|>")]
    whole = rendered(tokenizer, "What is it?", "lower", "higher")
    assert play(tokenizer, action, (action[-1],), StepResult("higher"))[1][1] == whole
    shown = play(tokenizer, action, (action[-1],), StepResult("<|end|>"))[1][1]
    whole = rendered(tokenizer, "What is it?", "lower", "X")
    assert shown.count(action[-1]) == whole.count(action[-1])
    assert tokenizer.decode(shown) == tokenizer.decode(whole).replace("X", "<|end|>")


@pytest.mark.parametrize("template", [MISTRAL, ZEPHYR, LLAMA_2])
def test_a_template_without_tools_shows_their_answers_as_the_users(template: str) -> None:
    tokenizer = sentencepiece("legacy", template)
    end = tokenizer.eos_token_id
    t, requests = play(tokenizer, [*sampled(tokenizer, "lower"), end], (end,), StepResult("42", role="tool"))
    assert (t.end_reason, t.turns) == ("done", 2)
    _, as_user = play(tokenizer, [*sampled(tokenizer, "lower"), end], (end,), StepResult("42"))
    assert requests == as_user


def test_a_template_with_tools_shows_their_answers_its_own_way() -> None:
    """Llama 3.1's writes them as JSON: quotes and line breaks are escaped."""
    tokenizer = llama_3()
    end = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    answer = 'it is "42"\n<|eot_id|>'
    _, requests = play(tokenizer, [*sampled(tokenizer, "lower"), end], (end,), StepResult(answer, role="tool"))
    assert requests[1].count(end) == 3
    text = tokenizer.decode(rendered(tokenizer, "What is it?", "lower", 'it is "42"\nXX', role="tool"))
    assert r'"it is \"42\"\nXX"' in text
    assert tokenizer.decode(requests[1]) == text.replace("XX", "<|eot_id|>")


def llama_3() -> PreTrainedTokenizerFast:
    more = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
    return byte_level(LLAMA_3, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>", more=more)


@pytest.mark.parametrize("end", ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"])
def test_no_end_is_written_behind_the_policys_own(end: str) -> None:
    tokenizer = llama_3()
    eot, own = tokenizer.convert_tokens_to_ids(["<|eot_id|>", end])
    stops = tuple(tokenizer.convert_tokens_to_ids(["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"]))
    action = sampled(tokenizer, "lower")
    _, requests = play(tokenizer, [*action, own], stops, StepResult("higher"))
    whole = rendered(tokenizer, "What is it?", "lower", "higher")
    place = len(requests[0]) + len(action)
    assert whole[place] == eot
    assert requests[1] == [*whole[:place], own, *whole[place + 1 :]]
    # Cut off by the token limit, the template closes the turn.
    _, requests = play(tokenizer, action, stops, StepResult("higher"))
    assert requests[1] == whole


@pytest.mark.parametrize("end", ["<|user|>", "<|endoftext|>"])
def test_the_token_that_opens_the_next_turn_is_no_end_of_this_one(end: str) -> None:
    """GLM's templates close no turn: a policy ends at the next speaker's token, or at the end of the text."""
    tokenizer = byte_level(GLM, eos_token="<|endoftext|>", more=("<|user|>", "<|assistant|>"))
    stops = tuple(tokenizer.convert_tokens_to_ids(["<|user|>", "<|endoftext|>"]))
    own = tokenizer.convert_tokens_to_ids(end)
    action = tokenizer.encode("lower")
    _, requests = play(tokenizer, [*action, own], stops, StepResult("higher"))
    whole = rendered(tokenizer, "What is it?", "lower", "higher")
    if end == "<|user|>":
        assert requests[1] == whole
    else:
        place = len(requests[0]) + len(action)
        assert requests[1] == [*whole[:place], own, *whole[place:]]


def test_what_parts_messages_is_special_whatever_the_tokenizer_calls_it() -> None:
    """DeepSeek's files do not mark the tokens of its roles: a tool could write the user's next message."""
    tokenizer = byte_level(GLM, eos_token="<|endoftext|>")
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ("<|user|>", "<|assistant|>", "<think>")])
    end, user, think = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|user|>", "<think>"])
    action = [*tokenizer.encode("lower"), end]
    _, requests = play(tokenizer, action, (end,), StepResult("higher <|user|> 42 <think>"))
    assert (requests[1].count(user), requests[1].count(think)) == (2, 1)
    assert "higher <|user|> 42 <think>" in tokenizer.decode(requests[1])


def test_plain_text_goes_on_as_one_text() -> None:
    tokenizer = sentencepiece("legacy", "")
    tokenizer.chat_template = None
    action = tokenizer.encode("It is lower", add_special_tokens=False)
    _, requests = play(tokenizer, action, (), StepResult(" than 42"))
    prompt = tokenizer.encode("What is it?", add_special_tokens=False)
    whole = tokenizer.encode("It is lower than 42", add_special_tokens=False)
    assert requests[1] == prompt + whole


def folder_of(path: Path, tokenizer: Any, config: Any = None, generation: Any = None) -> Path:
    tokenizer.save_pretrained(path)
    for name, ends in (("config.json", config), ("generation_config.json", generation)):
        if ends is not None:
            (path / name).write_text(json.dumps({"model_type": "qwen2", "eos_token_id": ends}))
    return path


def settings(folder: Path, *stop: str) -> RunConfig:
    return load("rehearsal", ["output=none", f"model.path='{folder}'", f"rollout.stop={json.dumps(stop)}"])


def chatml(eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    return byte_level(CHATML, eos_token=eos, more=("<|im_start|>", "<|im_end|>", "<|endoftext|>"))


def test_all_end_tokens_of_the_files_stop(tmp_path: Path) -> None:
    """As Llama 3.1: transformers' own generate stops at each of generation_config.json's."""
    tokenizer = llama_3()
    eot, eom, text = tokenizer.convert_tokens_to_ids(["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"])
    folder = folder_of(tmp_path, tokenizer, config=[text, eot], generation=[text, eom, eot])
    assert set(GenerationConfig.from_pretrained(folder).eos_token_id) == {eot, eom, text}
    assert episode_sampling(settings(folder), tokenizer).stop_token_ids == tuple(sorted((eot, eom, text)))
    (tmp_path / "generation_config.json").unlink()
    assert episode_sampling(settings(folder), tokenizer).stop_token_ids == tuple(sorted((eot, text)))
    (tmp_path / "generation_config.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a")
    with pytest.raises(ValueError, match="generation_config.json is a Git LFS pointer, not the file itself"):
        episode_sampling(settings(folder), tokenizer)


@pytest.mark.parametrize("config", [None, "<|im_end|>", "<|endoftext|>"])
def test_a_tokenizer_with_the_wrong_end_stops_at_the_right_one_too(config: str | None, tmp_path: Path) -> None:
    """As a GGUF conversion leaves it. Without config.json's word the chat template knows."""
    tokenizer = chatml(eos="<|im_start|>")
    start, end, text = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    folder = folder_of(tmp_path, tokenizer, config=config and tokenizer.convert_tokens_to_ids(config))
    stops = episode_sampling(settings(folder), tokenizer).stop_token_ids
    assert set(stops) == {start, end} | ({text} if config == "<|endoftext|>" else set())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warn_of_text(settings(folder), tokenizer)
    texts = [str(warning.message) for warning in said]
    if config is None:
        assert texts == []
    else:
        (line,) = texts
        assert f"of the tokenizer is '<|im_start|>' ({start}), that of config.json {config!r} (" in line
    action = [*sampled(tokenizer, "lower"), end]
    _, requests = play(tokenizer, action, stops, StepResult("higher"))
    assert requests[1] == rendered(tokenizer, "What is it?", "lower", "higher")


def test_nothing_is_said_of_files_that_agree(tmp_path: Path) -> None:
    tokenizer = chatml()
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    folder = folder_of(tmp_path, tokenizer, config=ends[0], generation=ends)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_text(settings(folder), tokenizer)


def test_a_model_without_chat_template_is_one_line(tmp_path: Path) -> None:
    tokenizer = chatml()
    tokenizer.chat_template = None
    folder = folder_of(tmp_path, tokenizer)
    with pytest.warns(UserWarning, match="has no chat template: messages are joined and trained as plain text") as said:
        warn_of_text(settings(folder), tokenizer)
    assert len(said) == 1


def test_answers_without_an_end_are_counted() -> None:
    tokenizer = chatml()
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    action = [*sampled(tokenizer, "lower"), end, start, *tokenizer.encode("lower")]
    t, _ = play(tokenizer, action, (), StepResult("higher"))
    assert (t.info["actions_truncated"], t.info["actions_with_chat_tokens"]) == (2, 2)
    metrics = rollout_metrics([t], 0, Counter(), Counter())
    assert (metrics["actions_truncated"], metrics["actions_with_chat_tokens"]) == (1.0, 1.0)
    t, _ = play(tokenizer, [*sampled(tokenizer, "lower"), end], (end,), StepResult("higher"))
    assert t.info == {}


@pytest.mark.parametrize("kind", ["bytes", "legacy"])
def test_a_stop_string_ends_an_action_with_the_token_that_completes_it(kind: str, tmp_path: Path) -> None:
    tokenizer = chatml() if kind == "bytes" else sentencepiece("legacy", ZEPHYR)
    said = "<answer> 42</answer>, lower"
    action = tokenizer.encode(said, add_special_tokens=False)
    needed = next(n for n in range(len(action)) if "</answer>" in tokenizer.decode(action[:n]))
    config = settings(folder_of(tmp_path, tokenizer), "</answer>", "never said")
    sampling = replace(episode_sampling(config, tokenizer), max_tokens=40)
    assert sampling.stop == ("</answer>", "never said")
    t = alone(tokenizer, ScriptedEngine(action), sampling)
    assert t.token_ids[t.action_mask].tolist() == action[:needed]
    assert t.behavior_logprobs[t.action_mask].tolist() == [-(i + 1) / 16 for i in range(needed)]
    assert t.info == {}


def test_stop_strings_stop_the_model_in_this_process(tmp_path: Path) -> None:
    """The sampled text of a random model, then one of its own stretches of letters as the stop string."""
    tokenizer = chatml()
    tokenizer.save_pretrained(write_model(tmp_path, vocab_size=len(tokenizer), max_position_embeddings=256))
    engine = TransformersEngine(tmp_path)
    free = Sampling(max_tokens=60, seed=3)
    t = alone(tokenizer, engine, free)
    ids, scores = t.token_ids[t.action_mask].tolist(), t.behavior_logprobs[t.action_mask].tolist()
    texts = [tokenizer.decode(ids[: n + 1]) for n in range(60)]
    place = next(n for n in range(20, 60) if texts[n].isascii() or "\ufffd" not in texts[n][-6:])
    stop = texts[place][-6:]
    first = next(n for n in range(60) if stop in texts[n])

    class Counting(TransformersEngine):
        longest = 0

        async def generate(self, token_ids: Any, sampling: Sampling) -> Any:
            answer = await super().generate(token_ids, sampling)
            self.longest = max(self.longest, len(answer.token_ids))
            return answer

    engine = Counting(tmp_path)
    stopped = alone(tokenizer, engine, replace(free, stop=(stop,)))
    assert stopped.token_ids[stopped.action_mask].tolist() == ids[: first + 1]
    assert stopped.behavior_logprobs[stopped.action_mask].tolist() == scores[: first + 1]
    assert engine.longest == first + 1  # it does not sample on to the limit


def test_servers_are_told_stop_strings(tmp_path: Path) -> None:
    sampling = Sampling(stop=("</answer>",), stop_token_ids=(7,))
    asked = VLLMDialect().request([1], sampling)["sampling_params"]
    assert (asked["stop"], asked["detokenize"], asked["include_stop_str_in_output"]) == (["</answer>"], True, True)
    assert VLLMDialect().request([1], Sampling())["sampling_params"]["detokenize"] is False
    asked = SGLangDialect().request([1], sampling)["sampling_params"]
    assert (asked["stop"], asked["no_stop_trim"], asked["stop_token_ids"]) == (["</answer>"], True, [7])
    folder = folder_of(tmp_path, chatml())
    for stop, skipped in (((), True), (("<|im_end|>", ")"), True), (("</answer>",), False)):
        line = command(settings(folder, *stop), ServeOptions(), 8000, accelerated=True)
        assert ("--skip-tokenizer-init" in line) is skipped


def alone(tokenizer: Any, engine: Any, sampling: Sampling) -> Trajectory:
    """An episode of one action."""
    environment = ScriptedEnvironment([StepResult(done=True)], prompt="What is it?")
    limits = Limits(max_context=200, step_timeout=5.0)
    return asyncio.run(run_episode(engine, environment, None, Codec(tokenizer), limits, sampling))
