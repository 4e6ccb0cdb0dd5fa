"""Text games of TextWorld (PyPI `textworld`): explore rooms, find keys, finish a quest; made up offline, 5 to 50 steps.

One episode, a command a turn:

    First of all, take a trip east. Then lift the latchkey ...     the prompt: the quest and the first room
    go east                                                        -= Bedroom =- You see a latchkey ...
    take latchkey                                                  You pick up the latchkey from the ground.
    unlock safe with latchkey                                      reward 1, done

A game takes some seconds to make; it is kept in a folder, so that it is made once.
"""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from nemo_flashrl.environments.environment import Message, StepResult

try:
    import textworld
    from textworld.generator import compile_game, make_game
except ModuleNotFoundError as error:
    raise ImportError(f"{error}: pip install 'nemo_flashrl[environments]'") from error

# Words that reach out of the game: to files, to another state of it, to what its rooms hide. No object has such a name.
# The interpreter reads nine letters of a word, and fewer where an underscore is among them.
_META = re.compile(
    r"(save|restore|restart|quit|script|undo|verify|version|restrict|enable|disable)$|transcrip|print_st|tw-"
)
_CLAUSE_STARTS = (".", ",", "then", "oops", "o")  # before a command; elsewhere "q" is part of a name: type Q box
_LONGEST_COMMAND = 190  # the interpreter cuts at 198, which would make another command of it
_STATUS_LINE = re.compile(r"\n> +-=.*")  # the interpreter's: room, score and number of moves
_PARSER = threading.Lock()  # TextWorld makes and reads games with one parser, which threads bring out of step
_INSTRUCTION = "You play a text game. Answer each time with one command on a line of its own, such as: go east"


@dataclass(frozen=True)
class Settings:
    """What games are made; `(seed, i)` and the sizes fix game i."""

    quest_length: int = 5  # commands of the shortest solution
    rooms: int = 3
    objects: int = 6
    show_commands: bool = False  # list the commands that are possible after every observation
    num_tasks: int = 1000
    seed: int = 0
    games_folder: str = "~/.cache/nemo_flashrl/textworld"

    def __post_init__(self) -> None:
        if not (1 <= self.quest_length <= 50 and 1 <= self.rooms <= 50 and 1 <= self.objects <= 100):
            raise ValueError(
                f"textworld: quest_length={self.quest_length} must be in 1..50, rooms={self.rooms} in 1..50, "
                f"objects={self.objects} in 1..100"
            )
        if self.num_tasks < 1:
            raise ValueError(f"textworld: num_tasks={self.num_tasks} must be at least 1")


def game_file(settings: Settings, index: int) -> Path:
    """The compiled game, made now if it was not made before; safe against others who make it at the same time."""
    sizes = (settings.quest_length, settings.rooms, settings.objects)
    folder = Path(settings.games_folder).expanduser() / "-".join(map(str, (*sizes, settings.seed)))
    target = folder / str(index) / "game.z8"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / "game"
        made.mkdir()
        options = textworld.GameOptions()
        options.seeds = {"map": settings.seed, "objects": index, "quest": index + 1, "grammar": settings.seed + index}
        options.quest_length, options.nb_rooms, options.nb_objects = sizes
        options.path, options.force_recompile = str(made / "game.z8"), True
        with _PARSER:
            game = make_game(options)
        compile_game(game, options)
        try:
            os.rename(made, target.parent)
        except OSError:  # somebody else was faster: their game is the same
            if not target.exists():
                raise
    return target


class TextWorld:
    """One game; each point of its score is an equal share of the reward, which is 1 when it is won."""

    Settings = Settings

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._game: Any = None
        self._score = 0
        # A call that nobody awaits any more runs on in its thread; the interpreter is C, and freed within one it would
        # end the process.
        self._turn = threading.Lock()

    @classmethod
    def tasks(cls, settings: Settings) -> Sequence[int]:
        return range(settings.num_tasks)

    async def reset(self, task: int) -> list[Message]:
        state = await asyncio.to_thread(self._start, task)
        prompt = f"{_INSTRUCTION}\n\n{state.objective}\n\n{state.description}"
        return [{"role": "user", "content": self._shown(prompt, state)}]

    async def step(self, action: str) -> StepResult:
        command = _last_line(action)
        if not command or _leaves_the_game(command):
            return StepResult(observation="That is no command of this game.")
        state, score, done = await asyncio.to_thread(self._step, command)
        reward, self._score = (score - self._score) / state.max_score, score
        info = {"won": bool(state.won), "score": score, "max_score": state.max_score}
        if done:
            return StepResult(reward=reward, done=True, success=bool(state.won), info=info)
        return StepResult(observation=self._shown(state.feedback, state), reward=reward, success=False, info=info)

    async def close(self) -> None:
        await asyncio.to_thread(self._end)

    def _step(self, command: str) -> tuple[Any, int, bool]:
        with self._turn:
            return self._game.step(command)

    def _end(self) -> None:
        with self._turn:
            if self._game is not None:
                self._game.close()

    def _start(self, task: int) -> Any:
        infos = textworld.EnvInfos(
            objective=True, description=True, admissible_commands=True, max_score=True, won=True, lost=True
        )
        with self._turn:
            file = game_file(self._settings, task)
            with _PARSER:
                self._game = textworld.start(str(file), infos)
            self._score = 0
            return self._game.reset()

    def _shown(self, text: str, state: Any) -> str:
        text = re.sub(r"\n{3,}", "\n\n", _STATUS_LINE.sub("", text)).strip()
        if self._settings.show_commands:
            text += f"\n\nPossible: {', '.join(state.admissible_commands)}"
        return text


def _leaves_the_game(command: str) -> bool:
    """Whether any of the commands in one line is none of the game; a backslash is for the interpreter itself."""
    words = [".", *re.findall(r'[.,"]|[^\s.,"]+', command.lower())]
    return "\\" in command or any(
        _META.match(word) or (word == "q" and before in _CLAUSE_STARTS) for before, word in pairwise(words)
    )


def _last_line(action: str) -> str:
    """The command: the last line that is not blank, printable ASCII as the game's interpreter wants it."""
    lines = [line.strip() for line in action.splitlines() if line.strip()]
    return re.sub(r"[^ -~]", " ", lines[-1][:_LONGEST_COMMAND]).strip() if lines else ""
