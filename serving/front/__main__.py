"""Run one front: python -m serving.front --triton HOST:PORT --port PORT."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

from compressor.errors import UserError
from serving.bundle import install
from serving.clients.address import parse_url

DRAIN_SECONDS = 30.0
"""How long requests in flight are still answered at the end: one of many texts is several requests to Triton, each with a
deadline of its own."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--triton", required=True, metavar="HOST:PORT", help="the server's gRPC endpoint")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=bounded(int, 1, 65535), default=8080)
    parser.add_argument("--keys", type=Path, metavar="FILE", help="API keys, one a line")
    parser.add_argument("--max-body", type=bounded(int, 1, 1 << 30), default=1 << 20, metavar="BYTES")
    seconds = {"metavar": "SECONDS"}
    parser.add_argument(
        "--timeout", type=bounded(float, 0.1, 600), default=10.0, **seconds, help="for an answer of Triton (10)"
    )
    parser.add_argument(
        "--drain", type=bounded(float, 0, 3600), default=DRAIN_SECONDS, **seconds, help="for the last answers (30)"
    )
    options = parser.parse_args()
    try:
        options.triton = grpc_endpoint(options.triton)
        serve(**vars(options))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def bounded(kind: type, least: float, most: float) -> Callable[[str], float]:
    """A type of argparse: a number from `least` to `most`."""

    def number(text: str) -> float:
        value = kind(text)
        if not least <= value <= most:  # nan is not, either
            raise argparse.ArgumentTypeError(f"{text} is not from {least} to {most}")
        return value

    number.__name__ = kind.__name__  # what argparse calls it where the text is no number
    return number


def grpc_endpoint(url: str) -> str:
    """HOST:PORT from that, or from grpc://HOST:PORT. Raises UserError E711 for another address."""
    address = parse_url(url if "//" in url else f"grpc://{url}")
    if address.protocol != "grpc" or address.tls:
        raise UserError("E711", f"{url!r:.100} is not an address of gRPC without TLS", "Give HOST:PORT or grpc://HOST:PORT")
    return str(address)


def serve(triton: str, host: str, port: int, keys: Path | None, max_body: int, timeout: float, drain: float) -> None:
    """Serve until SIGTERM or Ctrl-C; requests in flight are then answered for `drain` seconds. Raises UserError E701, E765."""
    try:
        import uvicorn

        from serving.front.app import Settings, make_app
    except ImportError as error:
        raise UserError("E701", f"the front needs {error.name}", install("front")) from error
    app = make_app(Settings(triton, keys_in(keys), timeout, max_body))
    uvicorn.run(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=math.ceil(drain))


def keys_in(path: Path | None) -> tuple[str, ...]:
    """The API keys in a file, one a line. Raises UserError E765."""
    if path is None:
        return ()
    try:
        keys = tuple(line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("E765", f"the file of API keys cannot be read ({error})", "Give a text file", str(path)) from error
    if not keys:  # an empty file must not open the front to everyone
        raise UserError("E765", "the file of API keys is empty", "Write one key a line", str(path))
    return keys


if __name__ == "__main__":
    main()
