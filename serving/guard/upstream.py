"""Connections to Triton's HTTP endpoint, which listens on a Unix socket: kept open and shared by all clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}
LARGEST_HEAD = 1 << 16
PIECE = 1 << 18
KEPT = 64
"""Idle connections that stay open."""


@dataclass
class Connection:
    """One connection; `used` when a request went over it before."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    used: bool = False


@dataclass
class Answer:
    """Triton's response. `length` is None for one sent in chunks; read `pieces` to the end, then `release` it."""

    status: int
    headers: dict[str, str]
    length: int | None
    reusable: bool
    connection: Connection
    upstream: Upstream = field(repr=False)
    complete: bool = False

    async def body(self) -> bytes:
        """The whole body of a response that has a length."""
        body = await self.connection.reader.readexactly(self.length)
        self.complete = True
        return body

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it arrives."""
        reader = self.connection.reader
        if self.length is None:
            while size := int((await reader.readline()).partition(b";")[0], 16):
                yield await reader.readexactly(size)
                await reader.readexactly(2)
            await reader.readline()
        else:
            left = self.length
            while left:
                piece = await reader.readexactly(min(left, PIECE))
                left -= len(piece)
                yield piece
        self.complete = True

    def release(self) -> None:
        """Return the connection; one whose response was not read to its end is closed, which cancels the request."""
        self.upstream.put_back(self.connection, self.complete and self.reusable)


class Upstream:
    """The Unix socket `path` of a Triton server."""

    def __init__(self, path: str):
        self.path = path
        self.idle: list[Connection] = []

    async def send(self, request: bytes) -> Answer:
        """Send a request and read the head of its response. Raises OSError or EOFError where the server is gone."""
        connection = self.idle.pop() if self.idle else await self._connect()
        try:
            return await self._exchange(connection, request)
        except (OSError, EOFError):
            if not connection.used:
                raise
        except BaseException:
            self.put_back(connection, reusable=False)
            raise
        self.close_idle()  # an idle connection ends with the server: once more, over a new one
        return await self._exchange(await self._connect(), request)

    async def _connect(self) -> Connection:
        return Connection(*await asyncio.open_unix_connection(self.path, limit=LARGEST_HEAD))

    async def _exchange(self, connection: Connection, request: bytes) -> Answer:
        try:
            connection.writer.write(request)
            if len(request) > PIECE:
                await connection.writer.drain()
            lines = (await connection.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        except BaseException:
            connection.writer.close()
            raise
        pairs = [line.split(": ", 1) for line in lines[1:] if line]
        named = {name.lower(): value for name, value in pairs}
        headers = {name: value for name, value in pairs if name.lower() not in HOP_BY_HOP}
        length = None if named.get("transfer-encoding") == "chunked" else int(named.get("content-length", 0))
        reusable = named.get("connection", "").lower() != "close"
        return Answer(int(lines[0].split(" ")[1]), headers, length, reusable, connection, self)

    def put_back(self, connection: Connection, reusable: bool) -> None:
        """Keep a connection for the next request, or close it."""
        connection.used = True
        if reusable and len(self.idle) < KEPT:
            self.idle.append(connection)
        else:
            connection.writer.close()

    def close_idle(self) -> None:
        """Close the connections that no request uses."""
        while self.idle:
            self.idle.pop().writer.close()
