"""Episodes against a real OpenEnv server, in its own process and its own virtual environment."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from doubles import TextEngine, text_tokenizer
from paths import HELPERS

from nemo_flashrl.config import settings_of
from nemo_flashrl.environments.openenv import OpenEnv
from nemo_flashrl.records import Sampling, Trajectory
from nemo_flashrl.rollout.chat_tokens import Codec
from nemo_flashrl.rollout.episode import Limits, run_episode

PYTHON = Path(sys.prefix) / "openenv" / "bin" / "python"


@pytest.fixture(scope="module")
def url():
    if not PYTHON.exists():
        pytest.skip(f"no OpenEnv server: {PYTHON} does not exist, `make setup` makes it")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([PYTHON, HELPERS / "openenv_server.py", str(port)])
    try:
        for _ in range(600):
            assert server.poll() is None, "the server ended at once"
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def episode(url: str, task: int, *actions: str, limits: dict[str, Any] | None = None, **given: Any) -> Any:
    given = {"url": url, "observation_field": "text", **given}
    environment = OpenEnv(settings_of(OpenEnv, given, "environment"))
    bounds = Limits(max_context=10**6, max_observation_tokens=1000, **(limits or {}))
    engine, sampling = TextEngine(*actions), Sampling(max_tokens=5000)
    return run_episode(engine, environment, task, Codec(text_tokenizer()), bounds, sampling)


def play(*arguments: Any, **options: Any) -> Trajectory:
    return asyncio.run(episode(*arguments, **options))


def test_an_episode_by_hand(url: str) -> None:
    """The hidden number is seed + offset = 42."""
    t = play(url, 40, "50", "41", "42", reset_options={"offset": 2}, instruction="A game.")
    assert text_tokenizer().decode(t.token_ids) == "A game.\n\nGuess a number.50lower41higher42"
    assert (t.reward, t.turns, t.end_reason, t.failed) == (0.75, 3, "done", True)  # 1 - 2/8, solved from 1 on
    t = play(url, 7, "7", observation_field=None)
    assert text_tokenizer().decode(t.token_ids[~t.action_mask]) == '{"text": "Guess a number."}'
    assert (t.reward, t.failed) == (1.0, False)


def test_an_action_that_is_none_is_told_so_and_the_episode_goes_on(url: str) -> None:
    t = play(url, 7, "[", "3", '{"guess": "7"}', '{"message": "7"}', action_field=None)
    assert (t.reward, t.turns, t.end_reason) == (1.0, 4, "done")
    told = text_tokenizer().decode(t.token_ids[~t.action_mask])
    assert "Error: the action must be JSON" in told and "message: Field required" in told


def test_sessions_are_apart(url: str) -> None:
    async def together() -> list[Trajectory]:
        return await asyncio.gather(*(episode(url, n, "3", str(n)) for n in (1, 5, 2, 9, 4)))

    episodes = asyncio.run(together())
    assert [text_tokenizer().decode(t.token_ids) for t in episodes] == [
        f"Guess a number.3{'higher' if n > 3 else 'lower'}{n}" for n in (1, 5, 2, 9, 4)
    ]
    assert all(t.reward == 0.875 for t in episodes)


@pytest.mark.parametrize(
    ("action", "error"),
    [
        ("raise", "disk full"),
        ("not a number", "invalid literal"),
        ("hang", "step: timed out after 5 s"),
        ("flood", "the server ended the session"),
    ],
)
def test_a_fault_of_the_server_ends_one_episode(url: str, action: str, error: str) -> None:
    t = play(url, 7, "1", action, limits={"step_timeout": 5.0 if action == "hang" else 60.0}, max_message_mib=1)
    assert (t.end_reason, t.turns) == ("environment_error", 2)
    assert error in t.info["error"]
    assert play(url, 7, "7").end_reason == "done"


def test_no_server() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
        t = play(f"http://127.0.0.1:{taken.getsockname()[1]}", 7, "7")
    assert (t.end_reason, t.action_count) == ("environment_error", 0)
    assert t.info["error"].startswith("reset: ClientConnectorError")
    with pytest.raises(ValueError, match="url='localhost:1' must begin with http"):
        OpenEnv.Settings(url="localhost:1")


def test_a_server_that_is_gone_leaves_no_client_open() -> None:
    async def one_answer(request: web.Request) -> web.WebSocketResponse:
        connection = web.WebSocketResponse()
        await connection.prepare(request)
        await connection.receive()
        await connection.send_json({"type": "observation", "data": {"observation": {}}})
        request.transport.abort()
        return connection

    async def closed() -> OpenEnv:
        application = web.Application()
        application.router.add_get("/ws", one_answer)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        environment = OpenEnv(OpenEnv.Settings(url=f"http://127.0.0.1:{runner.addresses[0][1]}"))
        await environment.reset(0)
        await asyncio.sleep(0.2)  # the client sees the end
        with pytest.raises(aiohttp.ClientConnectionResetError):
            await environment.close()
        await runner.cleanup()
        return environment

    assert asyncio.run(closed())._client.closed
