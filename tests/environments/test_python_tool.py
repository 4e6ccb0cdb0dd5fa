"""Untrusted Python in a process of its own: each limit is hit, in both ways of isolation; and whole episodes."""

from __future__ import annotations

import asyncio
import json
import os
import time

import pytest
from doubles import TextEngine, text_tokenizer

from nemo_flashrl.config import settings_of
from nemo_flashrl.environments import python_process
from nemo_flashrl.environments.python_process import Outcome, ProcessLimits, run_python
from nemo_flashrl.environments.python_tool import PythonTool
from nemo_flashrl.environments.tool_calls import MalformedCall, ToolCall, parse_tool_calls
from nemo_flashrl.environments.verifiable_math import Task
from nemo_flashrl.records import Sampling, Trajectory
from nemo_flashrl.rollout.chat_tokens import Codec
from nemo_flashrl.rollout.episode import Limits, run_episode

KNOWN = {"python": frozenset({"code"})}


@pytest.fixture(params=["namespace", "audit_hook"])
def isolated(request, monkeypatch) -> str:
    if request.param == "namespace" and python_process.isolation() != "namespace":
        pytest.skip("the kernel does not let this user make namespaces")
    monkeypatch.setattr(python_process, "isolation", lambda: request.param)
    return request.param


def run(code: str, **limits: float) -> Outcome:
    return asyncio.run(run_python(code, ProcessLimits(**limits)))


def test_output_and_errors(isolated: str) -> None:
    assert run("import sys\nprint(6 * 7)\nprint('é', file=sys.stderr)") == Outcome("42\né\n", "ended")
    failed = run("print(1, flush=True)\n1 / 0")
    assert failed.how == "died"
    assert failed.output == (
        '1\nTraceback (most recent call last):\n  File "<code>", line 2, in <module>\n'
        "ZeroDivisionError: division by zero\n"
    )
    assert "SyntaxError" in run("print(").output
    assert run("print(input())").how == "died"  # there is no input


def test_limits(isolated: str) -> None:
    assert run("print(1, flush=True)\nwhile True: pass", seconds=3.0) == Outcome("1\n", "timeout")
    swollen = run("x = 'a' * 10**9", bytes=256 * 2**20)
    assert (swollen.how, swollen.output.splitlines()[-1]) == ("died", "MemoryError")
    flooded = run("while True: print('x' * 1000)", output_bytes=5000)
    assert (flooded.how, len(flooded.output)) == ("output_limit", 5000)


def test_no_network(isolated: str) -> None:
    """To a server that listens on this very machine."""

    async def try_it() -> Outcome:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        (await asyncio.open_connection("127.0.0.1", port))[1].close()  # from here it can be reached
        outcome = await run_python(f"import socket\nsocket.create_connection(('127.0.0.1', {port}))", ProcessLimits())
        server.close()
        return outcome

    outcome = asyncio.run(try_it())
    assert outcome.how == "died"
    assert "unreachable" in outcome.output or "is not allowed here" in outcome.output


def test_what_it_starts_dies_with_it(isolated: str, tmp_path) -> None:
    """A grandchild in a session of its own would write to a file after a while."""
    late, forked = tmp_path / "late", tmp_path / "forked"
    code = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    open({str(forked)!r}, "w").close()
    time.sleep(1.5)
    open({str(late)!r}, "w").close()
while not os.path.exists({str(forked)!r}): time.sleep(0.01)
"""
    outcome = run(code)
    assert outcome.how == ("ended" if isolated == "namespace" else "died")
    time.sleep(2.5)
    assert forked.exists() == (isolated == "namespace")
    assert not late.exists()


def test_the_working_folder_goes_and_the_environment_stays_away(isolated: str, monkeypatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    outcome = run("import os\nopen('made', 'w').close()\nprint(os.getcwd(), 'SECRET' in os.environ)")
    folder, secret = outcome.output.split()
    assert not os.path.exists(folder) and secret == "False"


def test_tool_calls_are_strict() -> None:
    def call(text: str) -> str:
        return f"<tool_call>{text}</tool_call>"

    good = json.dumps({"name": "python", "arguments": {"code": "1"}})
    assert parse_tool_calls("just text", KNOWN) == []
    assert parse_tool_calls(f"a{call(good)}b\n{call(good)}", KNOWN) == [ToolCall("python", {"code": "1"})] * 2
    for text, message in (
        (call("{'name': 1}"), "one JSON object"),
        (call("[1]"), 'exactly "name" and "arguments"'),
        (call('{"name": "python"}'), 'exactly "name" and "arguments"'),
        (call('{"name": "bash", "arguments": {}}'), "no tool 'bash'; there is: python"),
        (call('{"name": ["python"], "arguments": {}}'), "no tool"),
        (call('{"name": "python", "arguments": {"code": "1", "x": 2}}'), "exactly: code"),
        (call("[" * 100_000), "one JSON object"),
        (f"<tool_call>{good}", "needs its"),
        (f"{good}</tool_call>", "needs its"),
        (f"<tool_call>{call(good)}", "needs its"),
        ("<tool_call>" * 100_000, "needs its"),
    ):
        with pytest.raises(MalformedCall, match=message):
            parse_tool_calls(text, KNOWN)


def play(*actions: str, **given: object) -> Trajectory:
    environment = PythonTool(settings_of(PythonTool, given, "environment"))
    limits = Limits(max_context=10**6, max_observation_tokens=1000)
    task, codec = Task("What is 17 * 23 - 4?", "387"), Codec(text_tokenizer())
    return asyncio.run(run_episode(TextEngine(*actions), environment, task, codec, limits, Sampling(max_tokens=5000)))


def call(code: object) -> str:
    return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>"


def observations(t: Trajectory) -> list[str]:
    """What the environment said after the prompt."""
    places = [i for i in range(1, len(t.action_mask)) if t.action_mask[i] != t.action_mask[i - 1]]
    pieces = [t.token_ids[a:b] for a, b in zip([0, *places], [*places, len(t.token_ids)], strict=True)]
    return [text_tokenizer().decode(piece) for piece in pieces[2::2]]


def test_an_episode_with_the_tool() -> None:
    both = f"{call('print(17 * 23)')} and {call('x = 1')}"
    t = play(both, call("while True: pass"), "Hm.", "\\boxed{387}", seconds=4.0)
    assert observations(t) == [
        "391\n[no output]",
        "[stopped after 4 seconds]",
        "Call the tool, or give the final answer in \\boxed{}.",
    ]
    assert (t.reward, t.turns, t.end_reason, t.failed) == (1.0, 4, "done", False)
    assert t.info == {"tool_calls": 3, "outcome": "right", "actions_truncated": 4}  # the engine stops at no token
    assert t.malformed  # "Hm." is neither a call nor an answer
    assert play("\\boxed{386}").info["outcome"] == "wrong"
    assert not play("\\boxed{386}").malformed


def test_a_malformed_call_is_an_observation_or_an_end() -> None:
    bad = "<tool_call>print(1)</tool_call>"
    t = play(bad, "\\boxed{387}")
    assert observations(t) == ["Error: a tool call must be one JSON object: Expecting value: line 1 column 1 (char 0)"]
    assert (t.reward, t.turns) == (1.0, 2)
    for code in (None, ["print(1)"], 1):
        t = play(call(code), "\\boxed{387}")
        assert observations(t) == ['Error: the argument "code" of python must be a string']
        assert (t.reward, t.end_reason) == (1.0, "done")
    t = play(bad, on_malformed="end")
    assert (t.reward, t.turns, t.end_reason, t.info["outcome"]) == (0.0, 1, "done", "malformed_call")
    with pytest.raises(ValueError, match="on_malformed='retry' must be one of observation, end"):
        PythonTool.Settings(on_malformed="retry")
