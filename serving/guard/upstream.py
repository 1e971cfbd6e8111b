"""Connections to Triton's HTTP endpoint, which listens on a Unix socket: kept open and shared by all clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}
LARGEST_HEAD = 1 << 16
PIECE = 1 << 18
KEPT = 64
"""Idle connections that stay open."""
QUIET_SECONDS, BEGUN_SECONDS = 0.5, 0.05
"""How long the requests in flight may take to end before one that blocks a thread, and how long that takes to begin."""
PROBE = b"GET /v2/health/live HTTP/1.1\r\nHost: triton\r\n\r\n"
PROBE_SECONDS, PROBES = 0.25, 8


@dataclass
class Connection:
    """One connection; `used` when a request went over it before, `era` which of the upstream's it was opened in."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    era: int
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
        """Return the connection; one whose response was not read to its end is closed, which ends a stream."""
        self.upstream.put_back(self.connection, self.complete and self.reusable)


class Upstream:
    """The Unix socket `path` of a Triton server.

    A thread of Triton's HTTP endpoint serves many connections, often one all of them, and a request to load a model blocks it
    until the model is loaded: every request on these connections would wait. `send_apart` sends such a request. What is in
    flight ends first, and requests meanwhile go over connections that are new, which no blocked thread accepts. That holds
    until it is answered, also where its caller has gone: the thread loads on.
    """

    def __init__(self, path: str):
        self.path = path
        self.idle: list[Connection] = []
        self.busy: set[int] = set()
        self.era = 0
        self.blocking = False
        self._open, self._quiet, self._one = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._open.set()
        self._quiet.set()

    async def send_apart(self, request: bytes) -> Answer:
        """`send`, for a request that blocks the thread which reads it; one at a time."""
        await self._one.acquire()
        answered = asyncio.create_task(self._block(request))
        answered.add_done_callback(lambda _: self._one.release())
        try:
            return await asyncio.shield(answered)
        except asyncio.CancelledError:
            answered.add_done_callback(_release)
            raise

    async def _block(self, request: bytes) -> Answer:
        """Send a request that blocks a thread, and be `blocking` until it is answered."""
        try:
            self._open.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._quiet.wait(), QUIET_SECONDS)
            self.close_idle()
            self.era, self.blocking = self.era + 1, True
            sent = asyncio.create_task(self._exchange(await self._connect_blindly(), request))
            await asyncio.wait([sent], timeout=BEGUN_SECONDS)
            self._open.set()
            return await sent
        finally:
            self._open.set()
            self.blocking = False

    async def send(self, request: bytes) -> Answer:
        """Send a request and read the head of its response. Raises OSError or EOFError where the server is gone."""
        await self._open.wait()
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
        """A new connection; while a thread is blocked, one that is answered at once."""
        for _ in range(PROBES if self.blocking else 0):
            connection = await self._connect_blindly()
            try:
                async with asyncio.timeout(PROBE_SECONDS):
                    await (await self._exchange(connection, PROBE)).body()
            except TimeoutError:
                self.put_back(connection, reusable=False)
            except BaseException:
                self.put_back(connection, reusable=False)
                raise
            else:
                self._end(connection)
                return connection
        return await self._connect_blindly()

    async def _connect_blindly(self) -> Connection:
        era = self.era  # of when it is asked for: what is accepted later may be of the thread that blocks
        return Connection(*await asyncio.open_unix_connection(self.path, limit=LARGEST_HEAD), era)

    def _end(self, connection: Connection) -> None:
        """Note that nothing is in flight on a connection any more."""
        self.busy.discard(id(connection))
        if not self.busy:
            self._quiet.set()

    async def _exchange(self, connection: Connection, request: bytes) -> Answer:
        self.busy.add(id(connection))
        self._quiet.clear()
        try:
            connection.writer.write(request)
            if len(request) > PIECE:
                await connection.writer.drain()
            lines = (await connection.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        except BaseException:
            connection.writer.close()
            self._end(connection)
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
        self._end(connection)
        if reusable and connection.era == self.era and len(self.idle) < KEPT:
            self.idle.append(connection)
        else:
            connection.writer.close()

    def close_idle(self) -> None:
        """Close the connections that no request uses."""
        while self.idle:
            self.idle.pop().writer.close()


def _release(answered: asyncio.Task[Answer]) -> None:
    """Close the connection of an answer for which nobody waits any more."""
    if not answered.cancelled() and not answered.exception():
        answered.result().release()
