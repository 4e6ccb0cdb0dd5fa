"""What a trainer and its rollout workers say to each other, over one stream of bytes: length, then msgpack.

    trainer -> worker    Start, first; Play, Cancel; Servers; Drain, Reopen; Revived
    worker -> trainer    Alive, from its start on; Ended, Failed; Drained; Lost, Revive

Arrays travel as their bytes. Nothing that a worker sends is unpickled: it runs environments, whose code is not ours.
"""

from __future__ import annotations

import json
import socket
import struct
from asyncio import StreamReader
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from nemo_flashrl.config import RunConfig
from nemo_flashrl.records import Sampling, Trajectory

_LENGTH = struct.Struct("!Q")
_ARRAYS = {
    "token_ids": np.int64,
    "action_mask": np.bool_,
    "behavior_logprobs": np.float32,
    "versions": np.int32,
    "turn_of_token": np.int32,
    "repeats": np.bool_,
}


class Message(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """One of those below."""


@dataclass(frozen=True)
class Plan:
    """What a worker makes its environment, its tasks and its tokenizer's codec of."""

    config: RunConfig
    tokenizer: Any
    vocab_size: int


class Start(Message):
    """What the worker plays with: a pickled `Plan`, from the process that started it."""

    plan: bytes


class Play(Message):
    """Play an episode; `number` names it in the answers."""

    number: int
    held_out: bool
    prompt_index: int
    task_index: int
    sample: int
    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...]

    @property
    def sampling(self) -> Sampling:
        """How each of its actions is sampled."""
        return Sampling(self.temperature, self.max_tokens, self.stop_token_ids, self.stop)


class Cancel(Message):
    """Nobody waits for this episode any more."""

    number: int


class Servers(Message):
    """Of each rollout server its life, 0 where it is down, and whether the weights it was started with are replaced."""

    lives: list[int]
    replaced: bool


class Drain(Message):
    """Hold up requests until `Reopen`; say `Drained` when none is in flight."""


class Reopen(Message):
    """Let requests through again."""


class Revived(Message):
    """The answer to `Revive`: the server's life now, or why it has none; `refused` for good."""

    server: int
    life: int = 0
    error: str = ""
    refused: bool = False


class Alive(Message):
    """Every second: resident memory in bytes; for how long an episode has blocked the event loop, and which."""

    memory: int
    ready: bool  # it has made what it plays with
    blocked_seconds: float
    number: int  # of the episode; -1 where none is to blame


class Ended(Message):
    """An episode has ended."""

    number: int
    trajectory: dict[str, Any]
    faults: dict[str, int]  # of all requests since the worker's start


class Failed(Message):
    """The run cannot continue: what an episode, or with -1 the worker's start, raised."""

    number: int
    kind: str
    error: str


class Drained(Message):
    """No request is in flight, and none will be before `Reopen`."""


class Lost(Message):
    """A server is down, or was started anew: do not count on this life of it."""

    server: int
    life: int


class Revive(Message):
    """A server is to be used (again): say `Revived` when it can be."""

    server: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(
    Start | Play | Cancel | Servers | Drain | Reopen | Revived | Alive | Ended | Failed | Drained | Lost | Revive
)


def packed(message: Message) -> bytes:
    """Its bytes on the stream."""
    content = _encoder.encode(message)
    return _LENGTH.pack(len(content)) + content


def receive(connection: socket.socket) -> Message | None:
    """The next message; None where the other side is gone."""
    length = _exactly(connection, _LENGTH.size)
    content = _exactly(connection, *_LENGTH.unpack(length)) if length else b""
    return _decoder.decode(content) if content else None


def _exactly(connection: socket.socket, count: int) -> bytes:
    """So many bytes, or none where the other side is gone."""
    content = bytearray(count)
    rest = memoryview(content)
    while rest:
        try:
            got = connection.recv_into(rest)
        except ConnectionError:
            got = 0
        if not got:
            return b""
        rest = rest[got:]
    return bytes(content)


async def read(stream: StreamReader) -> Message:
    """The next message. IncompleteReadError, ConnectionError: the other side is gone."""
    length = await stream.readexactly(_LENGTH.size)
    return _decoder.decode(await stream.readexactly(*_LENGTH.unpack(length)))


def pack_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    """The fields of `Ended`."""
    fields = {name: getattr(trajectory, name) for name in Trajectory.__dataclass_fields__}
    for name, kind in _ARRAYS.items():
        if fields[name] is not None:
            fields[name] = np.ascontiguousarray(fields[name], dtype=kind).data.cast("B")
    # As JSON, which the environment's guard holds it to: msgpack has no integer beyond 64 bits and no half surrogate.
    return fields | {"info": json.dumps(fields["info"])}


def unpack_trajectory(fields: dict[str, Any]) -> Trajectory:
    """The trajectory of `pack_trajectory`, bit for bit."""
    arrays = {
        name: np.frombuffer(bytearray(fields[name]), dtype=kind)
        for name, kind in _ARRAYS.items()
        if fields[name] is not None
    }
    sequences = {name: tuple(fields[name]) for name in ("segment_starts", "turn_rewards")}
    return Trajectory(**fields | arrays | sequences | {"info": json.loads(fields["info"])})


def as_text(error: BaseException) -> str:
    """Its message, which may hold half a surrogate pair."""
    return str(error).encode(errors="backslashreplace").decode()
