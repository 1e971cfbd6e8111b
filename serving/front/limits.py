"""Refuse bodies above a size, before they are read where their length is announced."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """ASGI middleware: HTTPException 413 for a body of more than `most` bytes, whether its length was announced or not.

    It is raised where the application reads the body, so that the application's own handler answers.
    """

    def __init__(self, app: ASGIApp, most: int):
        self.app, self.most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        seen = 0
        announced = dict(scope.get("headers", ())).get(b"content-length", b"0")

        async def limited() -> Message:
            nonlocal seen
            if announced.isdigit() and int(announced) > self.most:
                raise self._refusal
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.most:
                raise self._refusal
            return message

        await self.app(scope, limited if scope["type"] == "http" else receive, send)

    @property
    def _refusal(self) -> HTTPException:
        return HTTPException(413, f"the body has more than {self.most} bytes", {"connection": "close"})
