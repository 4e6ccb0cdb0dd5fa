"""Single-turn tasks with an answer that can be checked: real verifiers, real generators, episodes through the loop."""

from __future__ import annotations

import asyncio
import json
import sys
from fractions import Fraction
from typing import Any

import pytest
from doubles import TextEngine, text_tokenizer

from nemo_flashrl import environments
from nemo_flashrl.config import settings_of
from nemo_flashrl.environments import answers as scoring
from nemo_flashrl.environments.answers import as_number, boxed_answer, is_equal
from nemo_flashrl.environments.python_tool import PythonTool
from nemo_flashrl.environments.verifiable_math import Settings, VerifiableMath
from nemo_flashrl.records import Sampling, Trajectory
from nemo_flashrl.rollout.chat_tokens import Codec
from nemo_flashrl.rollout.curriculum import classes_of
from nemo_flashrl.rollout.episode import Limits, run_episode


def play(environment: Any, task: Any, *actions: str) -> Trajectory:
    limits = Limits(max_context=100_000, max_observation_tokens=5000)
    engine, sampling = TextEngine(*actions), Sampling(max_tokens=5000)
    return asyncio.run(run_episode(engine, environment, task, Codec(text_tokenizer()), limits, sampling))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{7}", "7"),
        ("\\boxed{1} no, \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\boxed{1} and \\boxed{2", "1"),
        ("the answer is 7", None),
        ("\\boxed{" * 100_000, None),
        ("\\boxed {42}", "42"),
        ("\\boxed{1} then \\boxed\n{ 42 }", "42"),
        ("\\boxed{\\left\\{1 \\right.}", "\\left\\{1 \\right."),
    ],
)
def test_the_last_box_counts(text: str, answer: str | None) -> None:
    assert boxed_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-3", Fraction(-3)),
        ("1,234,567", Fraction(1234567)),
        ("12,34", None),
        ("$0.50$", Fraction(1, 2)),
        ("-\\frac{6}{4}", Fraction(-3, 2)),
        ("\\dfrac{1}{3}", Fraction(1, 3)),
        ("2/4", Fraction(1, 2)),
        ("1/0", None),
        ("x", None),
        ("9" * 101, None),
        ("1e9999999", None),
        ("0.00001", Fraction(1, 100_000)),
        ("1e-05", Fraction(1, 100_000)),
        ("1E20", Fraction(10**20)),
        ("-2.5e+3", Fraction(-2500)),
    ],
)
def test_exact_numbers(text: str, value: Fraction | None) -> None:
    assert as_number(text) == value


def test_equality_is_by_value() -> None:
    async def all_of_it() -> list[bool]:
        pairs = [
            ("0.5", "\\frac{1}{2}"),
            ("0.3333", "\\frac{1}{3}"),
            ("x^2+2x+1", "(x+1)^2"),
            ("x^2+2x", "(x+1)^2"),
            ("(1,2)", "(1, 2)"),
            ("\\sqrt{8}", "2\\sqrt{2}"),
        ]
        return [await is_equal(*pair) for pair in pairs]

    assert asyncio.run(all_of_it()) == [True, False, True, False, True, True]


def test_constants_are_compared_exactly() -> None:
    """Of each pair: an answer, the right one, and whether they are one number."""
    pairs = [
        ("1/2^99", "1/2^98", False),
        ("\\frac{1}{2^{99}}", "\\frac{2}{2^{100}}", True),
        ("2^{-9999}", "2^{-9998}", False),
        ("10^{-5}", "0.00001", True),
        ("e-5", "1e-05", False),
        ("10^{20}", "1e20", True),
        ("10^{20}+1", "1e20", False),
        ("0.000000001", "2^{-30}", False),
        ("4", "4*sqrt(2)", False),
        ("4 sqrt(2)", "4", False),
        ("4√2", "4", False),
        ("4√2", "\\sqrt{32}", True),
        ("4**sqrt(2)", "4", False),
        ("2**3", "8", True),
        ("2**3", "2", False),
        ("2^{100}", "1267650600228229401496703205376", True),
        ("\\sqrt{2}+\\sqrt{3}", "\\sqrt{5+2\\sqrt{6}}", True),
        ("\\sqrt{2}", "1.414214", True),
        ("\\pi", "3.14", False),
        ("0.0000001", "10^{-8}\\pi", False),
        ("(1/2^99, 1)", "(1/2^98, 1)", False),
        ("50\\%", "50", True),
        ("x=5", "5", True),
    ]

    async def all_of_it() -> list[bool]:
        return [await is_equal(answer, right) for answer, right, _ in pairs]

    found = asyncio.run(all_of_it())
    assert [(*pair[:2], equal) for pair, equal in zip(pairs, found, strict=True)] == pairs


@pytest.mark.parametrize("literal", ["0.00001", "1e20", "1e-05", "0.12345678901234567890123", "123456789012345678901"])
def test_numbers_of_a_file_stay_as_they_are_written(tmp_path, literal: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(f'{{"question": "?", "answer": {literal}}}\n')
    (task,) = VerifiableMath.tasks(Settings(path=str(path)))
    assert task.answer == literal
    right = play(VerifiableMath(Settings()), task, f"\\boxed{{{literal}}}")
    wrong = play(VerifiableMath(Settings()), task, "\\boxed{e-5}")
    assert (right.reward, wrong.reward) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ('{"question": "?", "answer": null}', "answer=null is neither text nor a number"),
        ('{"question": "?", "answer": " "}', 'answer=" " is neither'),
        ('{"question": "?", "answer": [1]}', r'answer=\["1"\] is neither'),
        ('{"question": "?", "answer": {"value": 1}}', "is neither text nor a number"),
        ('{"question": "?", "answer": true}', "answer=true is neither"),
        ('{"question": "?", "answer": NaN}', "answer=NaN is neither"),
        ('{"question": "?", "answer": "\\\\boxed{}"}', "is an empty box"),
        ('{"question": null, "answer": 1}', "question=null is neither"),
    ],
)
def test_a_line_without_an_answer_is_refused(tmp_path, record: str, reason: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"question": "?", "answer": 1}\n' + record)
    with pytest.raises(ValueError, match=rf"set.jsonl:2: .*{reason}"):
        VerifiableMath.tasks(Settings(path=str(path)))


def test_a_verifier_that_hangs_or_dies_scores_nothing(monkeypatch) -> None:
    async def all_of_it() -> list[float]:
        await scoring.score(float, "1")  # the worker is up
        monkeypatch.setattr(scoring, "_SECONDS", 1.0)
        hangs = await scoring.score(__import__("time").sleep, 600)
        monkeypatch.setattr(scoring, "_SECONDS", 60.0)
        return [hangs, await scoring.score(__import__("os")._exit, 3), await scoring.score(float, "0.25")]

    assert asyncio.run(all_of_it()) == [0.0, 0.0, 0.25]


def test_made_up_arithmetic() -> None:
    tasks = VerifiableMath.tasks(Settings(num_tasks=50, terms=4, seed=3))
    assert [tasks[7], tasks[8]] == [VerifiableMath.tasks(Settings(num_tasks=9, terms=4, seed=3))[i] for i in (7, 8)]
    for task in tasks:
        assert eval(task.question.removeprefix("What is ").rstrip("?")) == int(task.answer)
    assert len({task.question for task in tasks}) == 50


def test_arithmetic_of_several_levels() -> None:
    """Task i has the i-th level's number of terms, in turn, and its class is known without making it."""
    settings = settings_of(VerifiableMath, {"levels": [2, 4, 6], "num_tasks": 9}, "environment")
    tasks = VerifiableMath.tasks(settings)
    levels = [str(sum(word.isdigit() for word in task.question.rstrip("?").split())) for task in tasks]
    assert levels == ["2", "4", "6"] * 3 == [task.level for task in tasks] == classes_of(tasks, "level")
    assert [task.level for task in VerifiableMath.tasks(Settings(num_tasks=2, terms=5))] == ["5", "5"]
    questions = settings_of(PythonTool, {"questions": {"levels": [3, 8], "num_tasks": 4}}, "environment")
    assert classes_of(PythonTool.tasks(questions), "level") == ["3", "8"] * 2
    with pytest.raises(ValueError, match=r"terms=3 and all of levels=\[2, 1\] at least 2"):
        Settings(levels=[2, 1])


def test_an_episode_of_arithmetic() -> None:
    settings = settings_of(VerifiableMath, {"num_tasks": 5}, "environment")
    task = VerifiableMath.tasks(settings)[2]
    right = play(VerifiableMath(settings), task, f"Well, \\boxed{{{task.answer}.0}}")
    wrong = play(VerifiableMath(settings), task, f"Well, \\boxed{{{task.answer}1}}")
    silent = play(VerifiableMath(settings), task, f"It is {task.answer}.")
    assert [(t.reward, t.failed, t.info["outcome"]) for t in (right, wrong, silent)] == [
        (1.0, False, "right"),
        (0.0, True, "wrong"),
        (0.0, True, "no_answer"),
    ]
    assert [t.malformed for t in (right, wrong, silent)] == [False, False, True]
    prompt = text_tokenizer().decode(right.token_ids[~right.action_mask])
    assert prompt == f"{task.question}\nThink step by step, then give the final answer in \\boxed{{}}."


def test_questions_from_a_file(tmp_path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(
        '{"problem": "Half?", "solution": "So \\\\boxed{\\\\frac{1}{2}}"}\n\n{"problem": "2?", "solution": 2}\n'
    )
    given = {"path": str(path), "question_field": "problem", "answer_field": "solution"}
    settings = settings_of(VerifiableMath, given, "environment")
    tasks = VerifiableMath.tasks(settings)
    assert [task.question for task in tasks] == ["Half?", "2?"]
    assert play(VerifiableMath(settings), tasks[0], "\\boxed{0.5}").reward == 1.0
    assert play(VerifiableMath(settings), tasks[1], "\\boxed{0.5}").reward == 0.0
    with pytest.raises(ValueError, match=r"set.jsonl:1: a JSON object with 'question' and 'solution' is needed"):
        VerifiableMath.tasks(settings_of(VerifiableMath, {**given, "question_field": "question"}, "environment"))
    path.write_text('{"question": "2?", "answer": 2, "subject": "sums"}\n{"question": "1?", "answer": 1}\n')
    with pytest.raises(ValueError, match=r"set.jsonl:2: .*'question' and 'answer' and 'subject' is needed \(KeyError"):
        VerifiableMath.tasks(Settings(path=str(path), level_field="subject"))
    path.write_text(
        '{"question": "2?", "answer": 2, "subject": "sums"}\n{"question": "1?", "answer": 1, "subject": 4}\n'
    )
    assert classes_of(VerifiableMath.tasks(Settings(path=str(path), level_field="subject")), "level") == ["sums", "4"]
    with pytest.raises(ValueError, match="curriculum.classes='level': task 0 has no field of that name, or None in it"):
        classes_of(VerifiableMath.tasks(Settings(path=str(path))), "level")
    with pytest.raises(ValueError, match="there is no such file"):
        VerifiableMath.tasks(Settings(path="nowhere.jsonl"))


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_letters_that_end_a_line_elsewhere_are_part_of_a_question(tmp_path, end: str) -> None:
    """And the mark that some editors begin a file with is not."""
    path, questions = tmp_path / "set.jsonl", ["a\u2028b", "c\u2029d", "e\u0085f", "\u00bd?"]
    lines = (json.dumps({"question": question, "answer": "1"}, ensure_ascii=False) + end for question in questions)
    path.write_bytes(("\ufeff" + "".join(lines)).encode())
    assert [task.question for task in VerifiableMath.tasks(Settings(path=str(path)))] == questions


def test_an_episode_of_reasoning_gym() -> None:
    reasoning_gym = environments.load("reasoning_gym")
    given = {"options": {"min_terms": 3, "max_terms": 3}, "num_tasks": 4, "seed": 1}
    settings = settings_of(reasoning_gym, given, "environment")
    tasks = reasoning_gym.tasks(settings)
    assert [len(tasks), tasks[0].question] == [
        4,
        "State the final answer to the following arithmetic problem: 4 - 1 - 7 =",
    ]
    answers = ("<answer>3</answer> no: <answer> -4 </answer>", "<answer>4</answer>", "-4")
    episodes = [play(reasoning_gym(settings), tasks[0], answer) for answer in answers]
    assert [(t.reward, t.failed, t.info["outcome"]) for t in episodes] == [
        (1.0, False, "right"),
        (0.0, True, "wrong"),
        (0.0, True, "no_answer"),
    ]
    for bad in ({"dataset": "no_such_set"}, {"options": {"no_such_option": 1}}, {"options": {"min_terms": -1}}):
        with pytest.raises(ValueError, match="environment.settings of reasoning_gym"):
            reasoning_gym.tasks(settings_of(reasoning_gym, bad, "environment"))


def test_several_data_sets_of_reasoning_gym_in_one_list() -> None:
    """Seven tasks of three generators in turn, each with its own options; a task is scored by its own generator."""
    reasoning_gym = environments.load("reasoning_gym")
    sets = {"chain_sum": {"min_terms": 3, "max_terms": 3}, "leg_counting": None, "decimal_chain_sum": {}}
    settings = settings_of(reasoning_gym, {"datasets": sets, "num_tasks": 7, "seed": 1}, "environment")
    tasks = reasoning_gym.tasks(settings)
    assert classes_of(tasks, "dataset") == [task.dataset for task in tasks] == [[*sets][i % 3] for i in range(7)]
    assert len({task.question for task in tasks}) == 7
    assert tasks[0].question.endswith("4 - 1 - 7 =")  # as it is alone
    answers = [reasoning_gym_answer(task) for task in tasks]
    played = [play(reasoning_gym(settings), t, f"<answer>{a}</answer>") for t, a in zip(tasks, answers, strict=True)]
    assert [t.reward for t in played] == [1.0] * 7
    assert [t.info["dataset"] for t in played] == [task.dataset for task in tasks]
    for bad, told in (
        ({"datasets": {"no_such_set": {}}}, "environment.settings of reasoning_gym, 'no_such_set'"),
        ({"datasets": sets, "num_tasks": 2}, "environment.settings.num_tasks=2: fewer than the 3 datasets"),
        ({"datasets": sets, "options": {"min_terms": 2}}, r"give each its own there, datasets.chain_sum=\{...\}"),
        ({"datasets": {"chain_sum": 3}}, "'chain_sum': its options are 3, not a mapping"),
    ):
        with pytest.raises(ValueError, match=told):
            reasoning_gym.tasks(settings_of(reasoning_gym, bad, "environment"))


def reasoning_gym_answer(task: Any) -> str:
    import reasoning_gym

    name, options, size, seed = task.source
    return reasoning_gym.create_dataset(name, size=size, seed=seed, **json.loads(options))[task.index]["answer"]


def test_without_its_package_an_environment_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.delitem(sys.modules, "nemo_flashrl.environments.reasoning_gym", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'nemo_flashrl\[reasoning-gym\]'"):
        environments.load("reasoning_gym")
