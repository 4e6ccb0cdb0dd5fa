"""An environment on a real OpenEnv server: guess a number. Run in the server's own virtual environment."""

from __future__ import annotations

import sys
import time

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    message: str


class Answer(Observation):
    text: str = ""


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.lenient = 0, False

    def reset(self, seed=None, episode_id=None, offset: int = 0, lenient: bool = False, **_) -> Answer:
        self.hidden, self.lenient = seed + offset, lenient
        return Answer(text="Guess a number.")

    def step(self, action: Guess, timeout_s=None, **_) -> Answer:
        if action.message == "raise":
            raise OSError("disk full")
        if action.message == "hang":
            time.sleep(30)
        if action.message == "flood":
            return Answer(text="x" * 3 * 2**20)
        if self.lenient and not action.message.isdecimal():
            return Answer(text="A number, please.")
        guess = int(action.message)
        if guess == self.hidden:
            return Answer(text="right", reward=1.0, done=True)
        return Answer(text="higher" if guess < self.hidden else "lower", reward=-0.125)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Guessing, Guess, Answer, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
