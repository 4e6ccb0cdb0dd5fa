"""Environments behind an OpenEnv server (github.com/huggingface/OpenEnv, protocol of openenv 0.10).

An episode is a session of the server's WebSocket `/ws`: {"type": "reset" | "step" | "close", "data": ...} as JSON,
answered by {"type": "observation", "data": {"observation": {...}, "reward": ..., "done": ...}} or {"type": "error"}.
Needs nothing of the openenv package, whose pins exclude NeMo's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_flashrl.environments.environment import Message, StepResult

try:
    import aiohttp
except ModuleNotFoundError as error:
    raise ImportError(f"{error}: pip install 'nemo_flashrl[environments]'") from error


@dataclass(frozen=True)
class Settings:
    """Where the server is, and how its observations and actions become text."""

    url: str = "http://localhost:8000"
    instruction: str = ""  # comes before the first observation
    observation_field: str | None = None  # of the observation, shown as it is; None: the whole observation as JSON
    action_field: str | None = (
        "message"  # of the action, filled with the policy's text; None: the text is the JSON action
    )
    reset_options: dict[str, Any] = field(default_factory=dict)  # sent with every reset, beside the seed
    solved_at: float = 1.0  # sum of rewards from which an episode counts as solved
    max_message_mib: int = 16  # a larger message ends the episode
    num_tasks: int = 10_000  # task i is the episode of seed `seed` + i
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"openenv: url={self.url!r} must begin with http:// or https://")
        if self.num_tasks < 1 or self.max_message_mib < 1:
            raise ValueError(
                f"openenv: num_tasks={self.num_tasks} and max_message_mib={self.max_message_mib} must be at least 1"
            )


class InvalidActionError(Exception):
    """The server does not know an action's fields: the policy's fault, which it may mend."""


class OpenEnv:
    """One episode: one session."""

    Settings = Settings

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._reward = 0.0

    @classmethod
    def tasks(cls, settings: Settings) -> Sequence[int]:
        return range(settings.seed, settings.seed + settings.num_tasks)

    async def reset(self, task: int) -> list[Message]:
        settings, self._reward = self._settings, 0.0
        self._client = aiohttp.ClientSession()
        self._socket = await self._client.ws_connect(
            f"{settings.url.rstrip('/')}/ws", max_msg_size=settings.max_message_mib * 2**20
        )
        answer = await self._ask("reset", {**settings.reset_options, "seed": task})
        content = f"{settings.instruction}\n\n{self._shown(answer)}" if settings.instruction else self._shown(answer)
        return [{"role": "user", "content": content}]

    async def step(self, action: str) -> StepResult:
        name = self._settings.action_field
        try:
            data = {name: action} if name is not None else json.loads(action)
        except (ValueError, RecursionError) as error:
            return StepResult(observation=f"Error: the action must be JSON: {error}", malformed=True)
        try:
            answer = await self._ask("step", data)
        except InvalidActionError as error:
            return StepResult(observation=f"Error: {error}", malformed=True)
        reward, done = float(answer["reward"] or 0), bool(answer["done"])
        self._reward += reward
        return StepResult(self._shown(answer), reward, done, self._reward >= self._settings.solved_at)

    async def close(self) -> None:
        try:
            if self._socket is not None and not self._socket.closed:
                await self._socket.send_json({"type": "close"})
                await self._socket.close()
        finally:
            if self._client is not None:
                await self._client.close()

    async def _ask(self, kind: str, data: Any) -> dict[str, Any]:
        """The data of the answer.

        Raises:
            InvalidActionError: the action is not of the server's form; the session goes on.
            RuntimeError: the server says "error" for another reason, or hangs up.
        """
        await self._socket.send_json({"type": kind, "data": data})
        message = await self._socket.receive()
        if message.type != aiohttp.WSMsgType.TEXT:
            raise RuntimeError(f"the server ended the session ({message.type.name}: {message.data})")
        answer = json.loads(message.data)
        if kind == "step" and answer["type"] == "error" and answer["data"].get("code") == "VALIDATION_ERROR":
            raise InvalidActionError(
                "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in answer["data"]["errors"])
            )
        if answer["type"] != "observation":
            raise RuntimeError(f"the server answered {kind} with {json.dumps(answer)[:500]}")
        return answer["data"]

    def _shown(self, answer: dict[str, Any]) -> str:
        observation, name = answer["observation"], self._settings.observation_field
        if name is not None:
            return str(observation[name])
        return json.dumps({key: value for key, value in observation.items() if key != "metadata"}, ensure_ascii=False)
