"""The HTTP endpoint that clients see: checks each request, passes it to Triton and its response back.

A request ends the Triton of the nvidia-pytriton wheel where it needs more stack than a thread has: a body with the content type
of a form (curl's default) needs twice its size, a chunked body 16 bytes for each chunk, and JSON some 100 bytes for each level.
So bodies are bounded, their JSON is of bounded depth, and they go on in one piece and as JSON.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass

from aiohttp import web

from serving.guard.model_control import Control, is_load
from serving.guard.request_limits import Refused, check_depth, check_shapes, json_part, too_large, uncompressed
from serving.guard.upstream import Answer, Upstream

STARTING, UP, DRAINING = "starting", "up", "draining"
WHY = {
    STARTING: "E737 the server is starting; try again in some seconds",
    DRAINING: "E737 the server is stopping and takes no more requests",
}
HEADER_LENGTH = "Inference-Header-Content-Length"
LIVE = "/v2/health/live"
TARGET = re.compile(r"/[!-~]*")
BODY_SECONDS = 60
"""A body of which nothing arrives for so long is given up."""
HELD_BODIES = 8
"""All bodies being read at one time: so many of the largest size."""
WHOLE = 1 << 20
"""Responses up to this size are passed on in one piece."""

OF_THE_CLIENT = re.compile(
    rb'\{"error":"(failed to (parse the request JSON|get request params)|Unable to parse|Unable to set |'
    rb"attempt to (get|access) |Expected JSON object)"
)
"""Triton answers 500 to what is wrong with a request; these are answered with 400."""


@dataclass
class Limits:
    """`max_body` in bytes, of one request, uncompressed."""

    max_body: int


def header_length(request: web.BaseRequest) -> str | None:
    """How much of a body is JSON, as its header says; None where the whole is. Triton heeds the header where it infers, and
    parses the whole body of every other request."""
    path = request.raw_path.partition("?")[0]
    return request.headers.get(HEADER_LENGTH) if path.endswith("/infer") else None


class Proxy:
    """State and handlers of the endpoint. `state` is STARTING, UP or DRAINING."""

    def __init__(self, upstream: Upstream, metrics: Upstream, limits: Limits, control: Control | None = None):
        self.upstream, self.metrics, self.limits, self.control = upstream, metrics, limits, control
        self.state = STARTING
        self.in_flight = 0
        self.held = 0
        self.idle = asyncio.Event()
        self.idle.set()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Respond to a request of the HTTP port."""
        if self.state != UP:
            if request.raw_path == LIVE:
                return web.Response(headers=SERVER)
            return self._unavailable(WHY[self.state])
        self.in_flight += 1
        self.idle.clear()
        try:
            return await self._pass_on(request)
        except Refused as refused:
            response = failure(refused.status, str(refused))
            if request.content.exception():  # where its body ends, and the next request begins, is unknown
                response.force_close()
            return response
        except (OSError, EOFError):
            return self._unavailable("E737 the server ended before it answered; try again in some seconds")
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self.idle.set()

    async def handle_metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        """Respond to a request of the metrics port."""
        if self.state == DRAINING:
            return self._unavailable(WHY[DRAINING])
        if request.method != "GET" or request.path != "/metrics":
            return failure(404, "only GET /metrics is served here")
        try:
            return await self._relay(request, await self.metrics.send(b"GET /metrics HTTP/1.1\r\nHost: triton\r\n\r\n"))
        except (OSError, EOFError):
            return self._unavailable(WHY[STARTING])

    async def _pass_on(self, request: web.BaseRequest) -> web.StreamResponse:
        target, headers = request.raw_path, request.headers
        if request.method not in ("GET", "POST") or not TARGET.fullmatch(target):
            return failure(405, "GET and POST of a path are served")
        body = await self._body(request)
        lines, send = [f"{request.method} {target} HTTP/1.1", "Host: triton"], self.upstream.send
        if self.control:
            allowed, body = await self.control.authorize(request.method, target, headers, body)
            lines += allowed
            if allowed and is_load(target):  # another is refused by Triton at once, and has nothing to wait for
                send = self.upstream.send_apart
        lines.append(f"Content-Length: {len(body)}")
        if body:
            lines.append("Content-Type: application/json")
            # of the body that was checked: tritonclient also sends it, with the length of an earlier request, where none is
            if (length := header_length(request)) is not None:
                lines.append(f"{HEADER_LENGTH}: {length}")
        if (accepted := headers.get("Accept-Encoding")) is not None:
            lines.append(f"Accept-Encoding: {accepted}")
        head = "\r\n".join(lines).encode("latin-1", errors="replace")
        return await self._relay(request, await send(head + b"\r\n\r\n" + body))

    async def _body(self, request: web.BaseRequest) -> bytes:
        """The body, uncompressed and checked. Raises Refused."""
        if not request.body_exists:
            return b""
        headers = request.headers
        if (request.content_length or 0) > self.limits.max_body:
            raise too_large(self.limits.max_body)
        if headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        body = await self._read(request.content)
        body = uncompressed(body, headers.get("Content-Encoding", "").lower(), self.limits.max_body)
        text = json_part(body, header_length(request))
        check_depth(text)
        check_shapes(text, len(body))
        return body

    async def _read(self, content: asyncio.StreamReader) -> bytes:
        if content.is_eof():  # it came with the head, as most do
            body = content.read_nowait()
            if len(body) > self.limits.max_body:
                raise too_large(self.limits.max_body)
            return body
        body = bytearray()
        try:
            while not content.at_eof():
                async with asyncio.timeout(BODY_SECONDS):
                    piece = await content.readany()
                body += piece
                self.held += len(piece)
                if len(body) > self.limits.max_body:
                    raise too_large(self.limits.max_body)
                if self.held > HELD_BODIES * self.limits.max_body:
                    raise Refused(503, "E737", "the server is receiving too much at one time; try again in some seconds")
        except TimeoutError:
            raise Refused(408, "E736", f"nothing of the body arrived for {BODY_SECONDS} s") from None
        finally:
            self.held -= len(body)
        if malformed := content.exception():  # it came with the last piece
            raise malformed
        return bytes(body)

    async def _relay(self, request: web.BaseRequest, answer: Answer) -> web.StreamResponse:
        """Triton's response as ours."""
        try:
            headers = answer.headers | SERVER
            if answer.length is not None and answer.length <= WHOLE:
                body = await answer.body()
                status = 400 if answer.status == 500 and OF_THE_CLIENT.match(body) else answer.status
                return web.Response(status=status, body=body, headers=headers)
            response = web.StreamResponse(status=answer.status, headers=headers)
            response.content_length = answer.length
            await response.prepare(request)
            try:
                async for piece in answer.pieces():
                    await response.write(piece)
            except (OSError, EOFError, ValueError):
                # its head is sent: only the end of the connection tells the client that something is missing
                if request.transport is not None:
                    request.transport.close()
                return response
            await response.write_eof()
            return response
        finally:
            answer.release()

    def _unavailable(self, why: str) -> web.Response:
        response = failure(503, why, {"Retry-After": "2"})
        if self.state == DRAINING:
            response.force_close()
        return response


SERVER = {"Server": "compress"}


def failure(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    """An error as Triton writes it: JSON with the key `error`."""
    text = json.dumps({"error": message})
    return web.Response(status=status, text=text, content_type="application/json", headers=SERVER | (headers or {}))
