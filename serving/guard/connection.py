"""The guard's side of a client's connection: what aiohttp cannot read as HTTP is answered as the guard answers everything."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from serving.guard.proxy import failure
from serving.guard.request_limits import Refused


class Connection(web.RequestHandler):
    """aiohttp's connection with answers in Triton's form, and an end of bodies whose chunks are malformed."""

    def data_received(self, data: bytes) -> None:
        """Parse what arrived; a body in which that failed ends with Refused (E736)."""
        super().data_received(data)
        if not self._messages:
            return
        # aiohttp's parser in C neither ends such a body nor gives it an exception: it queues an error as the next request.
        # A request behind a body that has not ended can only be that.
        bodies = [body for _, body in self._messages]
        if self._current_request is not None:
            bodies.insert(0, self._current_request.content)
        for body in bodies[:-1]:
            if not body.is_eof():
                body.set_exception(Refused(400, "E736", "a chunk of the body is malformed"))
                body.feed_eof()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The response to what is not HTTP (400), and to an error of this program (500), which is logged."""
        if status == 400:
            reason = next(iter((message or "").splitlines()), "").rstrip(":")
            response = failure(400, f"E736 the request is not HTTP ({reason})")
        else:
            super().handle_error(request, status, exc, message)
            response = failure(status, "the server failed to handle the request; see its log")
        response.force_close()
        return response


class Server(web.Server):
    """aiohttp's server of such connections. Where a client is gone its request is given up, and so is the connection to Triton,
    which notices that when it sends: a stream that has begun ends, any other response is computed to its end."""

    def __init__(self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]):
        super().__init__(handler, handler_cancellation=True)

    def __call__(self) -> Connection:
        return Connection(self, loop=asyncio.get_running_loop(), access_log=None, auto_decompress=False)
