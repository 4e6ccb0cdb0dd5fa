"""Real games of TextWorld, made here and played through the agent loop."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from typing import Any

import pytest
from doubles import TextEngine, text_tokenizer

from nemo_flashrl.environments.textworld import Settings, TextWorld, game_file
from nemo_flashrl.records import Sampling, Trajectory
from nemo_flashrl.rollout.chat_tokens import Codec
from nemo_flashrl.rollout.episode import Limits, run_episode


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> Settings:
    return Settings(quest_length=12, rooms=4, seed=3, games_folder=str(tmp_path_factory.mktemp("games")))


def play(settings: Settings, *actions: str, **limits: Any) -> Trajectory:
    bounds = Limits(
        max_context=10**6, **{"max_turns": 50, "max_observation_tokens": 5000, "step_timeout": 300.0, **limits}
    )
    engine, sampling = TextEngine(*actions), Sampling(max_tokens=5000)
    return asyncio.run(run_episode(engine, TextWorld(settings), 5, Codec(text_tokenizer()), bounds, sampling))


def test_a_game_is_won_by_its_walkthrough(settings: Settings) -> None:
    file = game_file(settings, 5)
    made = file.stat().st_mtime_ns
    walkthrough = json.loads(file.with_suffix(".json").read_text())["metadata"]["walkthrough"]
    assert len(walkthrough) == 12
    t = play(settings, *(f"I think I should now:\n{command}\n" for command in walkthrough))
    assert (t.reward, t.turns, t.end_reason, t.failed) == (1.0, 12, "done", False)
    assert t.info["won"] and t.info["score"] == t.info["max_score"]
    assert file.stat().st_mtime_ns == made  # kept, not made again


def test_episodes_begin_side_by_side(settings: Settings) -> None:
    """TextWorld reads every game with one parser, which two threads at a time bring out of step."""

    async def begin() -> list[list[Any]]:
        return await asyncio.gather(*(TextWorld(settings).reset(5) for _ in range(8)))

    assert len({messages[0]["content"] for messages in asyncio.run(begin())}) == 1


def test_a_game_is_not_freed_within_a_call(settings: Settings) -> None:
    """A step that took too long is no longer awaited, and its thread is still in the interpreter."""
    order, begun, go_on = [], threading.Event(), threading.Event()

    class SlowGame:
        def step(self, command: str) -> None:
            begun.set()
            go_on.wait(60)
            order.append("step ends")

        def close(self) -> None:
            order.append("freed")

    async def play_too_slowly() -> None:
        environment = TextWorld(settings)
        environment._game = SlowGame()
        step = asyncio.create_task(environment.step("look"))
        await asyncio.to_thread(begun.wait)
        step.cancel()
        closing = asyncio.create_task(environment.close())
        await asyncio.sleep(0.1)
        assert order == []
        go_on.set()
        await closing

    asyncio.run(play_too_slowly())
    assert order == ["step ends", "freed"]


def test_odd_commands_do_no_harm(settings: Settings) -> None:
    odd = ("", "quit", "save", "x" * 5000, "\x00\x1b[2Jlöök", "look\r\x0cgo nowhere")
    t = play(settings, *odd, max_turns=len(odd))
    assert (t.turns, t.reward, t.end_reason) == (6, 0.0, "turn_limit")
    assert text_tokenizer().decode(t.token_ids).count("That is no command of this game.") == 3


def test_commands_that_reach_out_of_the_game_are_refused_wherever_they_stand(
    settings: Settings, tmp_path, monkeypatch
) -> None:
    """A saved game would outlive its episode, as a file of the working folder."""
    monkeypatch.chdir(tmp_path)
    clauses = ("save", "Restore", "restart", "quit", "q", "script on", "transcripting", "undo", "version", "verify")
    hidden = ("print_state", "print_stuff", "enable print state option", "tw-print version", "restrict commands")
    commands = [f"look{then}{word}" for word in clauses for then in (". ", ".", ", ", " then ", ". look.")]
    commands += [*hidden, "me, save", "look\\_save", "\\help", 'look." save']
    t = play(settings, *commands, "look", max_turns=len(commands) + 1)
    text = text_tokenizer().decode(t.token_ids)
    assert text.count("That is no command of this game.") == len(commands) == 59
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["unlock type Q box with type Q key", "examine manuscript", "look. inventory"])
def test_names_are_no_commands(settings: Settings, command: str) -> None:
    t = play(settings, command, "look", max_turns=2)
    assert "no command of this game" not in text_tokenizer().decode(t.token_ids)


def test_what_is_shown(settings: Settings) -> None:
    shown = play(Settings(**{**vars(settings), "show_commands": True}), "inventory", "look", max_turns=2)
    text = text_tokenizer().decode(shown.token_ids)
    assert text.startswith("You play a text game.")
    assert len(re.findall(r"\n\nPossible: .*inventory", text)) == 2
    assert "-=" in text and not re.search(r"\n> +-=", text)
    assert (shown.end_reason, shown.failed) == ("turn_limit", True)
    with pytest.raises(ValueError, match="quest_length=51 must be in 1..50"):
        Settings(quest_length=51)
