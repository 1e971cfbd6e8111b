"""Model control through the guard: who may load and unload models, and that a request brings no model of its own.

The token comes from a file that only its owner can read.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from compressor.errors import UserError
from serving.guard.request_limits import Refused

PATH = re.compile(r"/v2/repository/(?:index|models/(?P<model>[A-Za-z0-9][\w.-]*)/(?P<verb>load|unload))", re.ASCII)
SHORTEST_TOKEN = 16
SECRET_HEADER = "Compress-Model-Control"
"""The header that Triton itself wants for these requests. Only the guard sends it: others do not reach Triton's socket."""


class Control:
    """Requests of model control with `Authorization: Bearer TOKEN` go on with `secret`; the others Triton refuses."""

    def __init__(self, token: str, secret: str, repository: Path):
        self.token, self.secret, self.repository = token.encode(), secret, repository

    async def authorize(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> tuple[list[str], bytes]:
        """Header lines that authorize the request at Triton, and its body there. Raises Refused.

        A request of another kind gets no header.
        """
        if method != "POST" or not (match := PATH.fullmatch(target)):
            return [], body
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        given = token.strip().encode(errors="replace")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given, self.token):
            raise Refused(403, "E741", "model control needs the header 'Authorization: Bearer TOKEN' with this server's token")
        if match["verb"] == "load":
            refuse_contents(body)
            await asyncio.get_running_loop().run_in_executor(None, self._refuse_unsafe, match["model"])
            body = b""  # not what was read otherwise here than it would be there, such as two keys of one name
        return [f"{SECRET_HEADER}: {self.secret}"], body

    def _refuse_unsafe(self, model: str) -> None:
        from serving.repository_safety import refuse_unsafe  # imported here: only this request needs protobuf

        try:
            refuse_unsafe(self.repository, [model])
        except UserError as error:
            raise Refused(400, error.code, str(error).removeprefix(f"{error.code} ")) from None


def is_load(target: str) -> bool:
    """Whether it is the path of a load request, which Triton answers when the model is loaded."""
    match = PATH.fullmatch(target)
    return bool(match and match["verb"] == "load")


def refuse_contents(body: bytes) -> None:
    """Raise Refused where a load request carries a config or files: models come from the repository's folder alone."""
    try:
        names = list(json.loads(body or b"{}").get("parameters", {}))
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise Refused(400, "E736", "the body of a load request is not a JSON object") from None
    if names:
        what = f"a load request may not carry '{names[0]}': models come from the repository's folder"
        raise Refused(403, "E741", what)


def read_token(path: Path) -> str:
    """The token in the file `path`. Raises UserError E740 when it is unreadable, open to other users, or unfit."""
    fix = f"Make one: (umask 077; python3 -c 'import secrets; print(secrets.token_hex())' > {path})"
    try:
        with path.open(encoding="ascii") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            token = file.read(4096).strip()
    except (OSError, ValueError) as error:
        raise UserError(
            "E740", f"cannot be read ({getattr(error, 'strerror', None) or 'not ASCII'})", fix, str(path)
        ) from error
    if mode & 0o077:
        raise UserError("E740", "other users can read or write the token", f"Close it: chmod 600 {path}", str(path))
    if not re.fullmatch(rf"[!-~]{{{SHORTEST_TOKEN},}}", token):
        raise UserError("E740", f"the token is not one word of {SHORTEST_TOKEN} or more characters", fix, str(path))
    return token
