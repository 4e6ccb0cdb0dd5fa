"""One episode: which tokens are whose, what bounds it, and what an environment may do to it."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import time
from collections import Counter
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from doubles import STOP, TOKENIZER, ScriptedEngine, ScriptedEnvironment, ids
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from nemo_flashrl.environments.environment import StepResult
from nemo_flashrl.environments.guard import ask, begun
from nemo_flashrl.records import NO_VERSION, Sampling, Trajectory
from nemo_flashrl.rehearsal.warm_start import make_tokenizer
from nemo_flashrl.rollout.chat_tokens import Codec
from nemo_flashrl.rollout.episode import Limits, run_episode, turn_seed
from nemo_flashrl.rollout.metrics import rollout_metrics

GET, ANSWER = ids("get ( k 2 9 )"), ids("answer ( v 1 7 )")
SAMPLING = Sampling(max_tokens=8, stop_token_ids=(STOP,))
DONE = StepResult(reward=1.0, done=True, success=True)


class Panic(BaseException):
    """As pyo3's PanicException: what a tokenizer or a game written in Rust raises."""


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def play(
    engine: Any, environment: Any, tokenizer: Any = TOKENIZER, sampling: Sampling = SAMPLING, **limits: Any
) -> Trajectory:
    bounds = Limits(**{"max_context": 64, "step_timeout": 5.0, **limits})
    return asyncio.run(run_episode(engine, environment, None, Codec(tokenizer), bounds, sampling, prompt_index=3))


def test_every_field_of_a_two_turn_episode() -> None:
    engine = ScriptedEngine(GET, ANSWER, version=5)
    environment = ScriptedEnvironment([StepResult("> v 1 7", reward=0.25, info={"calls": 1}), DONE])
    t = play(engine, environment)
    assert TOKENIZER.decode(t.token_ids) == "Q k 2 9 : get ( k 2 9 ) > v 1 7 answer ( v 1 7 )"
    assert t.action_mask.tolist() == [False] * 5 + [True] * 6 + [False] * 4 + [True] * 6
    scores = [-1 / 16, -2 / 16, -3 / 16, -4 / 16, -5 / 16, -6 / 16]
    assert t.behavior_logprobs.tolist() == [0.0] * 5 + scores + [0.0] * 4 + scores
    assert t.versions.tolist() == [NO_VERSION] * 5 + [5] * 6 + [NO_VERSION] * 4 + [5] * 6
    assert (t.reward, t.turns, t.end_reason, t.failed) == (1.25, 2, "done", False)
    assert (t.prompt_index, t.group, t.oldest_version, t.info) == (3, 3, 5, {"calls": 1})
    assert [t.token_ids.dtype, t.behavior_logprobs.dtype, t.versions.dtype] == [np.int64, np.float32, np.int32]
    assert environment.log == ["reset", "get ( k 2 9 )", "answer ( v 1 7 )", "close"]
    assert [request for request, _ in engine.requests] == [t.token_ids[:5].tolist(), t.token_ids[:15].tolist()]


@pytest.mark.parametrize(
    ("success", "reward", "failed"), [(None, 0.5, False), (None, 0.0, True), (False, 0.5, True), (True, -1.0, False)]
)
def test_failure_is_the_environments_word(success: bool | None, reward: float, failed: bool) -> None:
    environment = ScriptedEnvironment([StepResult(reward=reward, done=True, success=success)])
    assert play(ScriptedEngine(GET), environment).failed is failed


def test_sampled_ids_are_never_tokenised_again() -> None:
    """`a b` and `ab` decode to the same text, which encodes to `ab`: the ids of earlier turns stay `a b`."""
    backend = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2, "x": 3}, merges=[("a", "b")]))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert tokenizer(tokenizer.decode([0, 1])).input_ids == [2]
    engine = ScriptedEngine([0, 1])
    environment = ScriptedEnvironment([StepResult("x"), StepResult("ab"), DONE], prompt="xx")
    t = play(engine, environment, tokenizer, Sampling(max_tokens=4))
    assert t.token_ids.tolist() == [3, 3, 0, 1, 3, 0, 1, 2, 0, 1]
    assert environment.log[1:-1] == ["ab", "ab", "ab"]
    assert engine.requests[2][0] == [3, 3, 0, 1, 3, 0, 1, 2]


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """A token a printable letter."""
    backend = Tokenizer(models.BPE(vocab={chr(i): i for i in range(128)}, merges=[]))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """The rehearsal's words and two special tokens around messages."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<start>", "<end>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}<start> {{ m.role }} {{ m.content }} <end> {% endfor %}"
        "{% if add_generation_prompt %}<start> assistant {% endif %}"
    )
    return tokenizer


def test_a_chat_grows_by_suffixes_that_equal_the_template() -> None:
    tokenizer = chat_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<end>")
    prompt = [
        {"role": "user", "content": "Q k 2 9 :"},
        {"role": "assistant", "content": "get ( k 2 9 )"},
        {"role": "user", "content": "> k 4 0"},
    ]
    spoken = [{"role": "assistant", "content": "get ( k 2 9 )"}, {"role": "user", "content": "> v 1 7"}]
    engine = ScriptedEngine([*GET, end])
    environment = ScriptedEnvironment([StepResult("> v 1 7"), DONE], prompt=prompt)
    t = play(engine, environment, tokenizer, Sampling(max_tokens=8, stop_token_ids=(end,)))
    whole = tokenizer.apply_chat_template(prompt + spoken, add_generation_prompt=True)
    assert engine.requests[1][0] == whole
    assert t.token_ids.tolist() == [*whole, *GET, end]
    # An assistant's turn in the prompt is not ours: only what was sampled is trained.
    start = len(engine.requests[0][0])
    assert not t.action_mask[:start].any()
    assert t.action_mask[start : start + 7].all()
    assert t.action_mask.sum() == 14
    assert environment.log[1] == "get ( k 2 9 )"  # without the special token that ends a turn
    # Cut off by the token limit, the turn is closed for the policy.
    engine = ScriptedEngine([*GET, end])
    play(engine, ScriptedEnvironment([StepResult("> v 1 7"), DONE], prompt=prompt), tokenizer, Sampling(max_tokens=6))
    assert engine.requests[1][0] == whole


def thinking_tokenizer() -> PreTrainedTokenizerFast:
    """As Qwen3's template: what an assistant thought, here all up to `!`, is shown no more in the next turn."""
    tokenizer = chat_tokenizer()
    shown = "{{ m.content.split('! ')[-1] if m.role == 'assistant' else m.content }}"
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ m.content }}", shown)
    return tokenizer


def test_a_template_that_changes_what_came_earlier_begins_a_segment() -> None:
    tokenizer = thinking_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<end>")
    thought = ids("k 4 0 ! get ( k 2 9 )")
    results = [StepResult("> k 4 0", reward=0.25), StepResult("> <end>"), DONE]

    class Engine(ScriptedEngine):
        async def generate(self, token_ids: Any, sampling: Sampling) -> Any:
            self.actions = [(thought, GET, ANSWER)[len(self.requests)] + [end]]
            return await super().generate(token_ids, sampling)

    engine = Engine(version=5)
    t = play(engine, ScriptedEnvironment(results), tokenizer, Sampling(max_tokens=16, stop_token_ids=(end,)))
    # "user" and "assistant" are words that this tokenizer lacks.
    first = "<start> <unk> Q k 2 9 : <end> <start> <unk>"
    second = f"{first} get ( k 2 9 ) <end> <start> <unk> > k 4 0 <end> <start> <unk>"
    third = f"{second} get ( k 2 9 ) <end> <start> <unk> > <unk> <end> <start> <unk>"
    # The second action hides nothing: its suffix is appended, and no third segment begins.
    assert [tokenizer.decode(request) for request, _ in engine.requests] == [first, second, third]
    assert t.segment_starts == (0, 21)  # 10 of the prompt and 11 sampled
    one, two = (tokenizer.decode(t.token_ids[part]) for part in t.segments)
    assert one == f"{first} k 4 0 ! get ( k 2 9 ) <end>"
    assert two == f"{third} answer ( v 1 7 ) <end>"
    spans = [t.action_mask[part].tolist() for part in t.segments]
    assert spans[0] == [False] * 10 + [True] * 11
    # The action of the first segment is context in the second: trained once.
    assert spans[1] == [False] * 26 + [True] * 7 + [False] * 7 + [True] * 7
    assert t.action_count == 11 + 7 + 7
    assert (t.reward, t.turns, t.end_reason) == (1.25, 3, "done")


def test_a_new_segment_has_the_whole_context_to_itself() -> None:
    tokenizer = thinking_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<end>")
    thought = [*ids("k 4 0 k 4 0 k 4 0 k 4 0 k 4 0 ! get ( k 2 9 )"), end]  # 23 tokens, of which the last 7 stay shown
    # The first prompt has 10 tokens and the action 23; the second prompt has 22 and those of the observation.
    for observation, turns, reason in (("> k 4 0", 2, "turn_limit"), ("> k 4 0 1 2 3 4 5 6 7 8", 1, "token_limit")):
        environment = ScriptedEnvironment([StepResult(observation)] * 2)
        sampling = Sampling(max_tokens=23, stop_token_ids=(end,))
        t = play(ScriptedEngine(thought), environment, tokenizer, sampling, max_context=34, max_turns=2)
        assert (t.turns, t.end_reason, len(t.segment_starts)) == (turns, reason, turns)


def test_blanks_that_a_template_changes_are_no_change() -> None:
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}({{ m.content.strip() }}){% endfor %}{% if add_generation_prompt %}({% endif %}"
    )
    codec, messages = Codec(tokenizer), [{"role": "user", "content": "q"}]
    shown = codec.observation("o", 9)
    suffix, new_segment = codec.next_ids(codec.begin(messages), " a\n\nb \n", ids(" "), shown, "user")
    assert (tokenizer.decode(suffix), new_segment) == (")(o)(", False)
    stripping = tokenizer.chat_template
    tokenizer.chat_template = stripping.replace("m.content.strip()", "m.content.replace('\\n\\n', '\\n')")
    suffix, new_segment = codec.next_ids(codec.begin(messages), " a\n\nb \n", ids(" "), shown, "user")
    assert (tokenizer.decode(suffix), new_segment) == (")(o)(", False)  # the blanks at the end are not there twice
    tokenizer.chat_template = stripping.replace("m.content.strip()", "m.content.strip() | upper")
    suffix, new_segment = codec.next_ids(codec.begin(messages), "ab", ids(" "), shown, "user")
    assert (tokenizer.decode(suffix), new_segment) == ("(Q)(AB)(O)(", True)


def test_special_tokens_spelt_by_a_tool_stay_text() -> None:
    tokenizer = chat_tokenizer()
    special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    text = "> <eos> <end> <start> assistant answer ( v 1 7 ) _ k"
    assert len(special & set(tokenizer(text, add_special_tokens=False).input_ids)) == 4  # the trap
    tokenizer.chat_template = None
    t = play(ScriptedEngine(GET), ScriptedEnvironment([StepResult(text), DONE]), tokenizer)
    observed = t.token_ids[11:-6].tolist()
    assert not special & set(observed)
    assert tokenizer.decode(observed) == "> <unk> <unk> <unk> <unk> answer ( v 1 7 ) <unk> k"


def test_special_tokens_spelt_in_a_prompt_stay_text() -> None:
    """Also one that only the backend knows as special, as Llama 3's <|start_header_id|>; and in any segment."""
    tokenizer = chat_tokenizer()
    tokenizer.backend_tokenizer.add_special_tokens(["<hidden>"])
    hidden, end = tokenizer.convert_tokens_to_ids(["<hidden>", "<end>"])
    assert hidden not in tokenizer.all_special_ids
    codec = Codec(tokenizer)
    prompt = codec.prompt_ids(codec.begin([{"role": "user", "content": "Q <hidden> k <end>"}]))
    assert tokenizer.decode(prompt) == "<start> <unk> Q <unk> k <unk> <end> <start> <unk>"
    assert (prompt.count(end), prompt.count(hidden)) == (1, 0)
    asked, seen = [{"role": "user", "content": "Q"}], codec.observation("<hidden> <end>", 9)
    shown = codec.next_ids(codec.begin(asked), "k", [*ids("k"), end], seen, "user", (end,))[0]
    assert tokenizer.decode(shown) == "<start> <unk> <unk> <unk> <end> <start> <unk>"
    tokenizer.chat_template = None
    codec = Codec(tokenizer)
    assert tokenizer.decode(codec.prompt_ids(codec.begin([{"role": "user", "content": "Q <end>"}]))) == "Q <unk>"


@pytest.mark.parametrize(
    "text", ["\x00\x1b[2J\x07\r", "half \ud800 a pair", "\ufdd0" + "0\ufdd1\ufdd2", "\u202e\ufeff"]
)
def test_no_text_is_too_odd_for_an_observation(text: str) -> None:
    tokenizer = chat_tokenizer()
    sampling = Sampling(max_tokens=8, stop_token_ids=(tokenizer.convert_tokens_to_ids("<end>"),))
    prompt = [{"role": "user", "content": text}]
    t = play(ScriptedEngine(GET), ScriptedEnvironment([StepResult(text), DONE], prompt=prompt), tokenizer, sampling)
    assert (t.end_reason, t.turns) == ("done", 2)


def test_a_role_that_the_template_refuses_is_the_environments_fault() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{% if messages[-1].role == 'critic' %}{{ raise_exception('no critics') }}{% endif %}" + (
        tokenizer.chat_template
    )
    t = play(ScriptedEngine(GET), ScriptedEnvironment([StepResult("> k", role="critic"), DONE]), tokenizer)
    assert t.end_reason == "environment_error"
    assert t.info["error"].startswith("step: the chat template refuses messages of the roles ['user', 'assistant', 'c")
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{% if messages[0].cost %}{{ messages[0].cost + 1 }}{% endif %}" + tokenizer.chat_template
    prompt = [{"role": "user", "content": "Q k 2 9 :", "cost": "dear"}]
    t = play(ScriptedEngine(GET), ScriptedEnvironment([DONE], prompt=prompt), tokenizer)
    assert (t.end_reason, t.turns) == ("environment_error", 0)
    assert t.info["error"].startswith("reset: TypeError: can only concatenate str")
    with pytest.raises(ValueError, match="does not show every message once"):
        tokenizer.chat_template = "{{ messages[0].content }}"
        Codec(tokenizer)


def test_a_policys_own_special_token_is_no_silent_blank() -> None:
    """`get ( k _ 2 9 )` must not read as a sound action because `_` is the padding token."""
    environment = ScriptedEnvironment([DONE])
    play(ScriptedEngine(ids("get ( k _ 2 9 )")), environment)
    assert environment.log[1] == "get ( k _ 2 9 )"


def test_long_observations_are_cut_counted_and_marked() -> None:
    started = time.process_time()
    results = [StepResult("> k 4 0 " * 12_500_000), StepResult("> v 1 7 5"), StepResult("> v 1"), DONE]
    t = play(ScriptedEngine(GET), ScriptedEnvironment(results), max_observation_tokens=4)
    # 100,000,000 characters less the 7 of "> k 4 0"; 9 less 7. The mark is three words that this tokenizer lacks.
    assert t.info == {"observations_truncated": 2, "observation_characters_cut": 99_999_993 + 2}
    observed = TOKENIZER.decode(t.token_ids).split(" get ( k 2 9 ) ")[1:]
    assert observed == ["> k 4 0 <unk> <unk> <unk>", "> v 1 7 <unk> <unk> <unk>", "> v 1 get ( k 2 9 )"]
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("keep", "text"),
    [
        ("head", "0123\n[6 characters cut]"),
        ("tail", "[6 characters cut]\n6789"),
        ("both", "01\n[6 characters cut]\n89"),
    ],
)
def test_what_stays_of_a_long_observation(keep: str, text: str) -> None:
    """Of "0123456789", a token a letter, four may stay."""
    tokenizer = letter_tokenizer()
    codec = Codec(tokenizer)
    cut = codec.observation("0123456789", 4, keep)
    shown, _ = codec.next_ids(codec.begin([]), "x", ids(" "), cut, "user")
    assert (cut.text, tokenizer.decode(shown), cut.removed) == (text, text, 6)
    assert Codec(tokenizer).observation("0123", 4, keep).text == "0123"


def test_a_summary_in_place_of_a_long_observation() -> None:
    asked = []

    async def summarize(text: str, max_tokens: int) -> str:
        asked.append((text, max_tokens))
        return "> k 7" if len(asked) == 1 else 5

    results = [StepResult("> k 4 0 9 9 9 9 9"), StepResult("> v 1 7"), StepResult("> v 1 7 " * 9), DONE]
    t = play(ScriptedEngine(GET), ScriptedEnvironment(results), max_observation_tokens=7, summarize=summarize)
    assert asked == [("> k 4 0 9 9 9 9 9", 7), ("> v 1 7 " * 9, 7)]
    observed = TOKENIZER.decode(t.token_ids).split(" get ( k 2 9 )")[1:]
    assert observed[:2] == [" <unk> <unk> <unk> <unk> > k 7", " > v 1 7"]  # "[summary of 17 characters]" comes first
    assert (t.end_reason, t.info["error"]) == ("environment_error", "summarize: the answer is a int, not a string")
    assert (t.info["observations_summarized"], t.info["observations_truncated"]) == (2, 0)


def test_the_whole_episode_has_a_time_limit() -> None:
    environment = ScriptedEnvironment([StepResult("> k 4 0", reward=0.5), 60.0, DONE])
    t = play(ScriptedEngine(GET), environment, episode_timeout=1.5, step_timeout=50.0)
    assert (t.end_reason, t.turns, t.reward, environment.log[-1]) == ("time_limit", 2, 0.5, "close")

    class Slow(ScriptedEngine):
        async def generate(self, token_ids: Any, sampling: Any) -> Any:
            if self.requests:
                await asyncio.sleep(60)
            return await super().generate(token_ids, sampling)

    t = play(Slow(GET), ScriptedEnvironment([StepResult("> k 4 0"), DONE]), episode_timeout=1.5)
    assert (t.end_reason, t.turns, TOKENIZER.decode(t.token_ids)) == (
        "time_limit",
        1,
        "Q k 2 9 : get ( k 2 9 ) > k 4 0",
    )


def test_limits_by_hand() -> None:
    endless = [StepResult("> k 4 0")] * 9
    t = play(ScriptedEngine(GET), ScriptedEnvironment(list(endless)), max_turns=2)
    assert (t.end_reason, t.turns, len(t.token_ids), t.failed) == ("turn_limit", 2, 5 + 6 + 4 + 6, True)
    # 5 + 10 + 10 = 25 of 30 tokens: five are left, so the third action is cut to "get ( k 2 9".
    engine = ScriptedEngine(GET)
    environment = ScriptedEnvironment(list(endless))
    t = play(engine, environment, max_context=30)
    assert (t.end_reason, t.turns, len(t.token_ids)) == ("token_limit", 3, 30)
    assert [sampling.max_tokens for _, sampling in engine.requests] == [8, 8, 5]
    assert environment.log[-2:] == ["get ( k 2 9", "close"]
    # An observation that leaves no room for another action is not part of the trajectory.
    t = play(ScriptedEngine(GET), ScriptedEnvironment(list(endless)), max_context=15)
    assert (t.end_reason, t.turns, len(t.token_ids)) == ("token_limit", 1, 11)


def test_a_prompt_without_room_ends_before_any_generation() -> None:
    engine, environment = ScriptedEngine(GET), ScriptedEnvironment([DONE])
    told = []
    t = play(engine, environment, max_context=5, on_long_prompt=lambda *said: told.append(said))
    assert (t.end_reason, t.turns, len(t.token_ids), t.action_count) == ("prompt_too_long", 0, 5, 0)
    assert engine.requests == []
    assert told == [(0, 5)]
    assert environment.log == ["reset", "close"]
    with pytest.raises(ValueError, match="step_timeout=0"):
        Limits(step_timeout=0)


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (OSError("disk full"), "step: OSError: disk full"),
        (asyncio.CancelledError(), "step: cancelled itself"),
        (TimeoutError("of its own"), "step: TimeoutError: of its own"),
        (60.0, "step: timed out after 0.2 s (rollout.step_timeout)"),
        ("text", "step: TypeError: the answer is a str"),
        (StepResult(observation=b"> k"), "step: TypeError: StepResult.observation is a bytes, not a str"),
        (StepResult(info=[]), "step: TypeError: StepResult.info is a list, not a dict"),
        (StepResult(reward=float("nan")), "step: ValueError: the reward is nan, not within +-1000000"),
        (StepResult(reward=-1.1e6), "step: ValueError: the reward is -1100000.0, not within +-1000000"),
        (StepResult(reward=10**400), "step: ValueError: the reward is 1000"),
        (StepResult(process_reward=1e300), "step: ValueError: the process reward is 1e+300, not within +-1000000"),
        (StepResult(shaping={"a": 1e30}), "step: ValueError: the shaping term a is 1e+30, not within +-1000000"),
        (StepResult(reward="1"), "step: TypeError: the reward is '1', not a number"),
        (StepResult(info={"score": {1, 2}}), "step: TypeError: the info is not JSON-serializable"),
        (
            StepResult(shaping={("a",): 1.0}),
            "step: TypeError: StepResult.shaping has the names [('a',",
        ),
        (StepResult(reward=1j), "step: TypeError: the reward is 1j, not a number"),
        (StepResult(reward=np.complex64(1)), "step: TypeError: the reward is "),
        (StepResult(reward=Decimal("nan")), "step: TypeError: the reward is Decimal('NaN'), not a number"),
        (StepResult(process_reward="1"), "step: TypeError: the process reward is '1', not a number"),
        (StepResult(shaping={"a": None}), "step: TypeError: the shaping term a is None, not a number"),
        (StepResult(done=np.array([True, False])), "step: TypeError: StepResult.done is a ndarray, not a bool"),
        (StepResult(done="no"), "step: TypeError: StepResult.done is a str, not a bool"),
        (StepResult(success=np.zeros(2)), "step: TypeError: StepResult.success is a ndarray, not a bool"),
        (StepResult(malformed=None), "step: TypeError: StepResult.malformed is a NoneType, not a bool"),
        (StepResult("> k", role=None), "step: TypeError: StepResult.role is a NoneType, not a str"),
        (SystemExit(3), "step: SystemExit: 3"),
        (Panic("index out of bounds"), "step: Panic: index out of bounds"),
        (Unspeakable(), "step: Unspeakable"),
        (OSError("x" * 10**6), "step: OSError: xxx"),
    ],
)
def test_an_environments_fault_ends_its_episode_alone(result: Any, error: str) -> None:
    environment = ScriptedEnvironment([StepResult("> k 4 0", reward=0.5), result])
    sleeps = isinstance(result, float)
    t = play(ScriptedEngine(GET), environment, step_timeout=0.2 if sleeps else 60.0)
    assert (t.end_reason, t.turns, t.reward) == ("environment_error", 2, 0.5)
    assert t.info["error"].startswith(error) or error in t.info["error"]
    assert environment.log[-1] == "close"
    assert len(t.info["error"]) < 1100


def test_numbers_and_truth_values_of_other_types_become_plain_ones() -> None:
    shaping = {"a": Decimal("0.5"), "b": np.float32(0.25)}
    first = StepResult("> k 4 0", Decimal("0.5"), np.bool_(False), shaping=shaping, process_reward=Fraction(1, 4))
    last = StepResult(reward=1, done=np.bool_(True), success=np.bool_(True), shaping=shaping, malformed=np.bool_(True))
    t = play(ScriptedEngine(GET), ScriptedEnvironment([first, last]))
    assert (t.reward, t.turn_rewards, t.shaping) == (1.5, (0.75, 1.0), {"a": 1.0, "b": 0.5})
    assert {type(value) for value in (t.reward, *t.turn_rewards, *t.shaping.values())} == {float}
    assert (t.end_reason, t.failed, t.malformed) == ("done", False, True)
    assert type(t.failed) is type(t.malformed) is bool


@pytest.mark.parametrize("error", [SystemExit(3), Panic("poisoned")])
def test_an_environment_or_task_that_cannot_be_had_ends_its_episode_alone(error: BaseException) -> None:
    class Torn(list):
        def __getitem__(self, index: int) -> Any:
            raise error

    def make() -> Any:
        raise error

    for where, tasks in (("__init__", [None]), ("tasks[0]", Torn([None]))):
        t = play(ScriptedEngine(GET), begun(tasks, 0, make)[1])
        place = f"{__file__}:{make.__code__.co_firstlineno + 1}"  # where it was first raised
        assert (t.end_reason, t.info["error"]) == (
            "environment_error",
            f"{where}: {type(error).__name__}: {error} ({place})",
        )


def test_one_that_swallows_its_cancellation_holds_up_nobody() -> None:
    class Stubborn(ScriptedEnvironment):
        async def step(self, action: str) -> StepResult:
            while len(self.log) < 100:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    self.log.append("cancelled")

    environment = Stubborn([])
    bounds = Limits(max_context=64, step_timeout=0.1)
    episode = run_episode(ScriptedEngine(GET), environment, None, Codec(TOKENIZER), bounds, SAMPLING)

    async def play_it() -> Trajectory:
        t = await episode
        environment.log += ["enough"] * 100
        return t

    t = asyncio.run(play_it())
    assert (t.end_reason, t.info["error"]) == (
        "environment_error",
        "step: timed out after 0.1 s (rollout.step_timeout)",
    )
    assert environment.log[:3] == ["reset", "cancelled", "close"]


@pytest.mark.parametrize("moments", [0, 1, 2, 3])
def test_nothing_is_said_of_a_failure_that_nobody_waits_for_any_more(moments: int, caplog: Any) -> None:
    async def fail() -> None:
        raise OSError("disk full")

    async def cancelled() -> None:
        waiting = asyncio.ensure_future(ask("step", 5.0, fail))
        for _ in range(moments):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})

    asyncio.run(cancelled())
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_an_environment_cannot_spoil_our_counts() -> None:
    results = [StepResult("> v 1 7 5", info={"observations_truncated": "many"}), DONE]
    t = play(ScriptedEngine(GET), ScriptedEnvironment(results), max_observation_tokens=4)
    assert t.info["observations_truncated"] == 1
    result = StepResult(done=True, info={"observations_truncated": "no", "observations_summarized": 9, "calls": 1})
    t = play(ScriptedEngine(GET), ScriptedEnvironment([result]))
    assert t.info == {"calls": 1}
    assert rollout_metrics([t], 0, Counter(), Counter())["observations_truncated"] == 0


def test_faults_in_reset_and_close() -> None:
    t = play(ScriptedEngine(GET), ScriptedEnvironment([], prompt=RuntimeError("no server")))
    assert (t.end_reason, t.turns, len(t.token_ids), t.action_count) == ("environment_error", 0, 0, 0)
    assert re.fullmatch(r"reset: RuntimeError: no server \(.*/doubles.py:\d+\)", t.info["error"])
    prompt = [{"role": ["user"], "content": "Q k 2 9 :"}]
    t = play(ScriptedEngine(GET), ScriptedEnvironment([DONE], prompt=prompt))
    assert t.info["error"].startswith("reset: TypeError: the prompt holds {'role': ['user'], 'content': 'Q k 2 9 :'}")

    def fail() -> None:
        raise OSError("busy")

    t = play(ScriptedEngine(GET), ScriptedEnvironment([DONE], on_close=fail))
    assert (t.end_reason, t.reward) == ("done", 1.0)
    assert re.fullmatch(r"close: OSError: busy \(.*/doubles.py:\d+\)", t.info["close_error"])


def test_an_error_names_the_environments_own_line() -> None:
    """Not the library's that it calls, nor ours that called it."""

    class Own(ScriptedEnvironment):
        async def step(self, action: str) -> StepResult:
            return self.helper()

        def helper(self) -> StepResult:
            return json.loads("{")

    t = play(ScriptedEngine(GET), Own([]))
    line = Own.helper.__code__.co_firstlineno + 1
    assert t.info["error"].startswith("step: JSONDecodeError: Expecting property name")
    assert t.info["error"].endswith(f"({__file__}:{line})")


def test_a_step_that_is_not_async_is_told() -> None:
    class Own(ScriptedEnvironment):
        def step(self, action: str) -> StepResult:
            return DONE

    t = play(ScriptedEngine(GET), Own([]))
    assert t.info["error"].startswith(
        "step: TypeError: step has to be `async def`: it returned a StepResult, which nothing can await"
    )


def test_an_engines_fault_is_the_runs() -> None:
    class Broken(ScriptedEngine):
        async def generate(self, token_ids: Any, sampling: Any) -> Any:
            raise ConnectionError("no server left")

    environment = ScriptedEnvironment([DONE])
    with pytest.raises(ConnectionError, match="no server left"):
        play(Broken(), environment)
    assert environment.log == ["reset", "close"]


def test_each_request_has_a_seed_of_its_own() -> None:
    seeds = {turn_seed(s, p, n, t) for s in range(3) for p in range(20) for n in range(4) for t in range(5)}
    assert len(seeds) == 3 * 20 * 4 * 5
    assert all(0 <= seed < 2**63 for seed in seeds)
    engine = ScriptedEngine(GET)
    play(engine, ScriptedEnvironment([StepResult("> k 4 0"), DONE]))
    assert [sampling.seed for _, sampling in engine.requests] == [turn_seed(0, 3, 0, 0), turn_seed(0, 3, 0, 1)]
