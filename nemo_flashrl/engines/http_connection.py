"""POSTs over connections that stay open, and no more of HTTP/1.1 than their answers need.

    post -> an idle connection, or a new one -> request ... answer: by its length, in chunks, or until the end

A general client spends more on a request than all else that a turn costs; it is for what is asked rarely.
"""

from __future__ import annotations

import asyncio
import re
import time
from urllib.parse import SplitResult, urlsplit

_END_OF_HEAD = b"\r\n\r\n"
_LONGEST_HEAD = 65536
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})[ \r]")
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)[ \t]*\r\n")
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:[^\r]*chunked[ \t]*\r\n")
_CLOSES = re.compile(rb"\r\nconnection:[^\r]*close[ \t]*\r\n")
_CHUNK = re.compile(rb"([0-9a-fA-F]+)[^\r\n]*\r\n")


class Connections:
    """To one server of plain `http://host:port/...`; for one event loop.

    Args:
        url: as `urlsplit` takes it apart.
        keep_alive: seconds for which a connection may be idle and still be used.
    """

    def __init__(self, url: str, keep_alive: float) -> None:
        self._url, self._keep_alive = urlsplit(url), keep_alive
        self._idle: list[_Connection] = []

    @staticmethod
    def can_reach(url: str) -> bool:
        """Whether it is no more than HTTP: neither TLS nor a password."""
        parts: SplitResult = urlsplit(url)
        return parts.scheme == "http" and bool(parts.hostname) and "@" not in parts.netloc

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and content of the answer to JSON. Raises OSError: there was none, or no HTTP."""
        connection = self._take()
        if connection is None:
            loop, address = asyncio.get_running_loop(), (self._url.hostname, self._url.port or 80)
            _, connection = await loop.create_connection(_Connection, *address)
        head = (
            f"POST {self._url.path}{path} HTTP/1.1\r\nHost: {self._url.netloc}\r\nAccept: */*\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        try:
            answer = await connection.ask(head.encode() + body)
        except BaseException:
            connection.transport.abort()
            raise
        if connection.stays:
            self._idle.append(connection)
        else:
            connection.transport.close()
        return answer

    def close(self) -> None:
        """Close what is idle."""
        for connection in self._idle:
            connection.transport.close()
        self._idle.clear()

    def _take(self) -> _Connection | None:
        """The one that was used last: the others may grow too old."""
        oldest = time.monotonic() - self._keep_alive
        while self._idle:
            connection = self._idle.pop()
            if connection.since >= oldest and not connection.transport.is_closing():
                return connection
            connection.transport.close()
        return None


class _Connection(asyncio.Protocol):
    """One request at a time; `stays` and `since` are of the last answer."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.stays, self.since = False, 0.0
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        self._parts: list[bytes] = []
        self._size, self._status, self._left = 0, 0, 0  # `_left`: bytes that shall come; -1 in chunks, -2 until the end
        self._answer = asyncio.get_running_loop().create_future()
        if self.transport.is_closing():
            raise ConnectionResetError("the server closed the connection")
        self.transport.write(request)
        return await self._answer

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():  # nobody asked
            self.transport.abort()
            return
        self._parts.append(data)
        self._size += len(data)
        try:
            if not self._status:
                self._read_head()
            if self._status and 0 <= self._left <= self._size:
                self._end(b"".join(self._parts))
            elif self._status and self._left == -1:
                content = _of_chunks(self._whole())
                if content is not None:
                    self._end(content)
        except ValueError as error:
            self._answer.set_exception(OSError(f"no HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is None or self._answer.done():
            return
        if self._status and self._left == -2:
            self._end(self._whole())
        else:
            self._answer.set_exception(error or ConnectionResetError("the server closed the connection"))

    def _whole(self) -> bytes:
        self._parts = [b"".join(self._parts)]
        return self._parts[0]

    def _read_head(self) -> None:
        head, found, rest = self._whole().partition(_END_OF_HEAD)
        status = _STATUS.match(head + b"\r")
        if (status is None and (found or len(head) >= 13)) or len(head) > _LONGEST_HEAD:
            raise ValueError(repr(head[:100]))
        if not found:
            return
        lines = head.lower() + b"\r\n"
        self._status, self._parts, self._size = int(status[1]), [rest], len(rest)
        self.stays = not _CLOSES.search(lines) and lines.startswith(b"http/1.1")
        length = _LENGTH.search(lines)
        self._left = -1 if _CHUNKED.search(lines) else int(length[1]) if length else 0 if self._status == 204 else -2

    def _end(self, content: bytes) -> None:
        self.since, self.stays = time.monotonic(), self.stays and self._left != -2
        self._answer.set_result((self._status, content))


def _of_chunks(data: bytes) -> bytes | None:
    """The content, once the last chunk and what may follow it are there."""
    parts, place = [], 0
    while (size := _CHUNK.match(data, place)) is not None:
        end = size.end() + int(size[1], 16)
        if end == size.end():
            return b"".join(parts) if data.startswith(b"\r\n", end) or data.endswith(_END_OF_HEAD) else None
        parts.append(data[size.end() : end])
        place = end + 2
    if len(data) > place + _LONGEST_HEAD:
        raise ValueError("a chunk without its size")
    return None
