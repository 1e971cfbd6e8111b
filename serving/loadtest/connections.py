"""Connections of a load test's client: prepared bytes out, an answer or the kind of an error back, as cheaply as possible.

Over HTTP these are asyncio's streams, because clients that build and parse each request cost more than a small model.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import quote

from serving.loadtest.traffic import Row, grpc_message, http_body

GRPC_INFER = "/inference.GRPCInferenceService/ModelInfer"
CHANNELS = 4
"""gRPC connections of one process: one alone would serialize its requests."""
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
MOST_ANSWER = 64 * 1024**2
CUT = 90


@dataclass(frozen=True)
class Endpoint:
    """Where requests go: `protocol` is "http" or "grpc"."""

    protocol: str
    host: str
    port: int
    model: str

    @property
    def address(self) -> str:
        """host:port, as a URL has it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Answer:
    """`error` is its kind, '' for none; else `body` with a JSON part of `header` bytes (-1: a gRPC message)."""

    body: bytes = b""
    header: int = -1
    error: str = ""


class Connections(Protocol):
    """What sends the rows of a model, each by its index."""

    async def ask(self, row: int) -> Answer: ...
    async def close(self) -> None: ...


def connect(endpoint: Endpoint, rows: Sequence[Row]) -> Connections:
    """Connections to an endpoint. They open when they are first needed."""
    return (GrpcConnections if endpoint.protocol == "grpc" else HttpConnections)(endpoint, rows)


def kind_of_error(status: object, text: str) -> str:
    """'400: batch-size must be <= N for ...': figures are left out, so that equal errors are one kind."""
    return f"{status}: {re.sub(r'[0-9]+', 'N', ' '.join(text.split()))[:CUT]}".rstrip(": ")


class HttpConnections:
    """One connection for each request in flight, kept open for later ones."""

    def __init__(self, endpoint: Endpoint, rows: Sequence[Row]):
        self.endpoint = endpoint
        head = f"POST /v2/models/{quote(endpoint.model)}/infer HTTP/1.1\r\nHost: {endpoint.address}\r\n"
        self.requests = [_http_request(head, *http_body(row)) for row in rows]
        self.idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, row: int) -> Answer:
        writer = None
        try:
            reader, writer = await self._connection()
            writer.write(self.requests[row])
            answer, stays = await _http_answer(reader)
        except (OSError, EOFError, asyncio.LimitOverrunError, ValueError) as error:
            answer, stays = Answer(error=f"connection: {type(error).__name__}"), False
        except asyncio.CancelledError:
            _abort(writer)
            raise
        if stays:
            self.idle.append((reader, writer))
        else:
            _abort(writer)
        return answer

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self.idle:
            reader, writer = self.idle.pop()
            if not reader.at_eof():  # a server may close what is idle
                return reader, writer
            _abort(writer)
        return await asyncio.open_connection(self.endpoint.host, self.endpoint.port)

    async def close(self) -> None:
        while self.idle:
            _abort(self.idle.pop()[1])


def _http_request(head: str, body: bytes, header: int) -> bytes:
    fields = f"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: {header}\r\n"
    return f"{head}{fields}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _abort(writer: asyncio.StreamWriter | None) -> None:
    if writer is not None:
        writer.transport.abort()


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
    return Answer(error=kind_of_error(status, _reason(body))), stays


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return body[:CUT].decode(errors="replace")


class GrpcConnections:
    """CHANNELS connections that the requests share in turn."""

    def __init__(self, endpoint: Endpoint, rows: Sequence[Row]):
        self.endpoint = endpoint
        self.requests = [grpc_message(endpoint.model, row) for row in rows]
        self.channels, self.calls, self.count = [], [], 0

    async def ask(self, row: int) -> Answer:
        import grpc

        if not self.calls:
            self._open()
        self.count += 1
        try:
            return Answer(await self.calls[self.count % CHANNELS](self.requests[row]))
        except grpc.aio.AioRpcError as error:
            return Answer(error=kind_of_error(error.code().name, error.details() or ""))

    def _open(self) -> None:
        import grpc

        for number in range(CHANNELS):
            # channels with equal options would share one connection
            options = [*UNLIMITED, ("grpc.use_local_subchannel_pool", 1), ("compress.channel", number)]
            self.channels.append(grpc.aio.insecure_channel(self.endpoint.address, options))
        self.calls = [channel.unary_unary(GRPC_INFER) for channel in self.channels]

    async def close(self) -> None:
        for channel in self.channels:
            await channel.close()
