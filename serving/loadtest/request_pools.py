"""Connections of a load test's client: prepared bytes out, an answer or the kind of an error back, as cheaply as possible.

These are asyncio's streams, because clients that build and parse each request cost more than a small model.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from serving.clients.address import Address
from serving.loadtest.grpc_frames import CallFailed, GrpcConnection, request_headers
from serving.loadtest.traffic import Row, grpc_message, http_body

GRPC_INFER = "/inference.GRPCInferenceService/ModelInfer"
MOST_ANSWER = 64 * 1024**2
CUT, MOST_REASON = 90, 400
FIGURES = re.compile(r"\b(E\d{3})\b|\d+", re.ASCII)
"""What of an error differs between requests; the code of one stays."""
CONNECTION = "connection: "
"""How the kind of an error begins where a connection failed."""


@dataclass(frozen=True)
class Endpoint:
    """Where requests go. `ca` is a file of certificates to trust; `token` is sent as a bearer token."""

    address: Address
    model: str
    ca: Path | None = None
    token: str | None = None

    def context(self) -> ssl.SSLContext | None:
        """The settings of TLS; None without it."""
        if not self.address.tls:
            return None
        context = ssl.create_default_context(cafile=self.ca)
        context.set_alpn_protocols(["h2" if self.address.protocol == "grpc" else "http/1.1"])
        return context


@dataclass(frozen=True)
class Answer:
    """`error` is its kind, '' for none, and `reason` the same in full; else `body` with a JSON part of `header` bytes (-1: a
    gRPC message)."""

    body: bytes = b""
    header: int = -1
    error: str = ""
    reason: str = ""


class Connection(Protocol):
    """A connection with asyncio's streams."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


@dataclass
class Streams:
    """A connection without state of its own."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


def connect(endpoint: Endpoint, rows: Sequence[Row]) -> Pool:
    """Connections to an endpoint. They open when they are first needed."""
    return GrpcPool(endpoint, rows) if endpoint.address.protocol == "grpc" else HttpPool(endpoint, rows)


def kind_of_error(status: object, text: str) -> str:
    """'400: batch-size must be <= N for ...': figures are left out, so that equal errors are one kind."""
    return f"{status}: {FIGURES.sub(lambda found: found[1] or 'N', ' '.join(text.split()))[:CUT]}".rstrip(": ")


def failure(status: object, text: str) -> Answer:
    """The answer to a request that was refused."""
    return Answer(error=kind_of_error(status, text), reason=f"{status}: {' '.join(text.split())[:MOST_REASON]}".rstrip(": "))


class Pool:
    """One connection for each request in flight, kept open for later ones."""

    def __init__(self, endpoint: Endpoint):
        self.endpoint, self.context = endpoint, endpoint.context()
        self.idle: list[Connection] = []

    async def ask(self, row: int) -> Answer:
        """Send a row, and wait for the answer."""
        connection = None
        try:
            connection = await self._connection()
            answer, stays = await self._answer(connection, row)
        except (OSError, EOFError, asyncio.LimitOverrunError, ValueError) as error:
            answer, stays = Answer(error=f"{CONNECTION}{type(error).__name__}"), False
        except asyncio.CancelledError:
            abort(connection)
            raise
        if stays:
            self.idle.append(connection)
        else:
            abort(connection)
        return answer

    async def _connection(self) -> Connection:
        while self.idle:
            connection = self.idle.pop()
            if not connection.reader.at_eof():  # a server may close what is idle
                return connection
            abort(connection)
        address = self.endpoint.address
        return self._opened(*await asyncio.open_connection(address.host, address.port, ssl=self.context))

    def _opened(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Connection:
        raise NotImplementedError

    async def _answer(self, connection: Connection, row: int) -> tuple[Answer, bool]:
        """The answer to a row, and whether the connection stays open."""
        raise NotImplementedError

    def close(self) -> None:
        """Close what is idle."""
        while self.idle:
            abort(self.idle.pop())


def abort(connection: Connection | None) -> None:
    """Close without waiting for anything."""
    if connection is not None:
        connection.writer.transport.abort()


class HttpPool(Pool):
    """HTTP/1.1."""

    def __init__(self, endpoint: Endpoint, rows: Sequence[Row]):
        super().__init__(endpoint)
        token = "" if endpoint.token is None else f"Authorization: Bearer {endpoint.token}\r\n"
        head = f"POST /v2/models/{quote(endpoint.model)}/infer HTTP/1.1\r\nHost: {endpoint.address}\r\n{token}"
        self.requests = [_http_request(head, *http_body(row)) for row in rows]

    def _opened(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Connection:
        return Streams(reader, writer)

    async def _answer(self, connection: Connection, row: int) -> tuple[Answer, bool]:
        connection.writer.write(self.requests[row])
        return await _http_answer(connection.reader)


class GrpcPool(Pool):
    """gRPC."""

    def __init__(self, endpoint: Endpoint, rows: Sequence[Row]):
        super().__init__(endpoint)
        self.headers = request_headers(GRPC_INFER, str(endpoint.address), endpoint.token, tls=endpoint.address.tls)
        self.requests = [grpc_message(endpoint.model, row) for row in rows]

    def _opened(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Connection:
        return GrpcConnection(reader, writer, self.headers)

    async def _answer(self, connection: GrpcConnection, row: int) -> tuple[Answer, bool]:
        try:
            return Answer(await connection.call(self.requests[row])), True
        except CallFailed as failed:
            return failure(*failed.args), True


def _http_request(head: str, body: bytes, header: int) -> bytes:
    fields = f"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: {header}\r\n"
    return f"{head}{fields}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def _http_answer(reader: asyncio.StreamReader) -> tuple[Answer, bool]:
    """The answer, and whether the connection stays open. Raises EOFError, ValueError for what is not HTTP with a length."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    status, length = int(first.split(" ")[1]), int(fields["content-length"]) if "content-length" in fields else -1
    if not 0 <= length <= MOST_ANSWER:
        raise ValueError("an answer without its length")
    body = await reader.readexactly(length)
    stays = fields.get("connection", "").lower() != "close"
    if status == 200:
        return Answer(body, int(fields.get("inference-header-content-length", 0))), stays
    return failure(status, _reason(body)), stays


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return body[:MOST_REASON].decode(errors="replace")
