"""Connections of our own against servers that answer in all the ways that HTTP/1.1 has, or not in HTTP at all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from nemo_flashrl.engines.http_connection import Connections

Story = Callable[[Connections], Awaitable[None]]


def served(answers: list[bytes | None], story: Story, *, pieces: int = 10**9, keep_alive: float = 5.0) -> list[bytes]:
    """Run `story` against a server that gives `answers` in turn; returns what it was asked on each connection.

    None closes the connection without an answer; what ends in "Connection: close" is followed by an end of it.
    """
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(b"")
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionResetError):
                return
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            asked[-1] += head + await reader.readexactly(length)
            said = answers.pop(0)
            for n in range(0, len(said or b""), pieces):
                writer.write(said[n : n + pieces])
                await writer.drain()
                await asyncio.sleep(0)
            if said is None or b"close" in said:
                writer.close()
                return

    async def all_of() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            connections = Connections(f"http://127.0.0.1:{port}/base", keep_alive)
            try:
                await asyncio.wait_for(story(connections), 20.0)
            finally:
                connections.close()

    asyncio.run(all_of())
    return asked


SIZED = b"HTTP/1.1 200 OK\r\ncontent-type: x\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;name=value\r\nllo\r\n0\r\nTrailer: x\r\n\r\n"
)
UNTIL_THE_END = b"HTTP/1.1 503 Unavailable\r\nConnection: close\r\n\r\nhello"
EMPTY = b"HTTP/1.1 204 No Content\r\n\r\n"


@pytest.mark.parametrize("pieces", [1, 7, 10**9])
@pytest.mark.parametrize(
    ("answer", "expected"),
    [(SIZED, (200, b"hello")), (CHUNKED, (200, b"hello")), (UNTIL_THE_END, (503, b"hello")), (EMPTY, (204, b""))],
)
def test_every_kind_of_answer(answer: bytes, expected: tuple[int, bytes], pieces: int) -> None:
    async def story(connections: Connections) -> None:
        for body in (b"{}", b"[1]"):
            assert await connections.post("/go?now=1", body) == expected

    asked = served([answer, answer], story, pieces=pieces)
    assert len(asked) == (2 if b"close" in answer else 1)  # one connection is enough
    assert b"".join(asked).startswith(b"POST /base/go?now=1 HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"".join(asked).count(b"Content-Type: application/json\r\n") == 2
    assert b"Content-Length: 2\r\n\r\n{}" in asked[0] and asked[-1].endswith(b"Content-Length: 3\r\n\r\n[1]")


def test_requests_at_once_have_connections_of_their_own_and_keep_them() -> None:
    async def story(connections: Connections) -> None:
        for _ in range(3):
            assert await asyncio.gather(*(connections.post("/", b"{}") for _ in range(4))) == [(200, b"hello")] * 4

    assert len(served([SIZED] * 12, story)) == 4


def test_an_idle_connection_grows_too_old() -> None:
    async def story(connections: Connections) -> None:
        for _ in range(2):
            await connections.post("/", b"{}")
            await asyncio.sleep(0.05)

    assert len(served([SIZED] * 2, story, keep_alive=0.01)) == 2


@pytest.mark.parametrize(
    "answer",
    [
        None,
        b"SSH-2.0-OpenSSH_9.6\r\nclose",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 9\r\n\r\nhello",  # less than was said
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",  # no last chunk
    ],
)
def test_half_an_answer_is_none(answer: bytes | None) -> None:
    async def story(connections: Connections) -> None:
        with pytest.raises(OSError):
            await connections.post("/", b"{}")
        assert await connections.post("/", b"{}") == (200, b"hello")

    assert len(served([answer, SIZED], story)) == 2


def test_a_cancelled_request_takes_its_connection_along() -> None:
    async def story(connections: Connections) -> None:
        waiting = asyncio.create_task(connections.post("/", b"{}"))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await connections.post("/", b"{}") == (200, b"hello")

    assert len(served([b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel", SIZED], story)) == 2


@pytest.mark.parametrize(
    ("url", "plain"),
    [
        ("http://a:1", True),
        ("http://[::1]:8000/base", True),
        ("https://a:1", False),
        ("http://me:word@a:1", False),
        ("unix:///a", False),
    ],
)
def test_what_is_more_than_http_is_left_to_the_general_client(url: str, plain: bool) -> None:
    assert Connections.can_reach(url) is plain
