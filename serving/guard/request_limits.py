"""What a request may be before Triton sees it: the size of its body, also when uncompressed, its JSON's depth, and shapes."""

from __future__ import annotations

import json
import math
import re
import zlib
from typing import Any

MAX_DEPTH = 64
"""Nested lists and objects in JSON. Triton parses recursively: 60,000 levels end it. A tensor needs as many as it has axes."""

MAX_ELEMENTS = 1 << 40
"""Of a tensor: a shape whose size exceeds 64 bits ends the process of a model, whatever data comes with it."""
LONG = b"0000000"
DIGITS = bytes.maketrans(b"123456789", b"000000000")
"""A shape of up to three axes that is too large has a number of at least so many digits."""
OUTSIDE = bytes(set(range(256)) - set(b'[]{}"'))
"""What says nothing about nesting."""
ANY_WINDOW = 47
"""zlib's `wbits` for a gzip or a zlib stream, whichever it is."""


class Refused(Exception):
    """A request that is answered with `status` and this message, and goes no further."""

    def __init__(self, status: int, code: str, what: str):
        self.status = status
        super().__init__(f"{code} {what}")


def too_large(limit: int) -> Refused:
    """The refusal of a body of more than `limit` bytes."""
    return Refused(413, "E735", f"the body is larger than {limit} bytes (compress serve --max-body)")


def uncompressed(body: bytes, encoding: str, limit: int) -> bytes:
    """The body as sent with `Content-Encoding: encoding`. Raises Refused where it is larger than `limit`, or damaged."""
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "deflate"):
        raise Refused(415, "E736", "the body's Content-Encoding is neither gzip nor deflate")
    stream = zlib.decompressobj(wbits=ANY_WINDOW)
    try:
        plain = stream.decompress(body, limit + 1)
    except zlib.error:
        raise Refused(400, "E736", f"the body is not {encoding} as its Content-Encoding says") from None
    if len(plain) > limit:
        raise too_large(limit)
    if not stream.eof or stream.unused_data:
        raise Refused(400, "E736", f"the {encoding} body is cut off, or something follows it")
    return plain


def json_part(body: bytes, header_length: str | None) -> bytes:
    """The JSON in front of binary tensors, `header_length` bytes of it (Triton's Inference-Header-Content-Length)."""
    if header_length is None:
        return body
    if not re.fullmatch(r"[0-9]{1,10}", header_length) or int(header_length) > len(body):
        raise Refused(400, "E736", "Inference-Header-Content-Length is not a length within the body")
    return body[: int(header_length)]


def check_depth(text: bytes) -> None:
    """Raise Refused for JSON that is nested deeper than MAX_DEPTH, or whose brackets do not match."""
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return
    quoted = text.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, OUTSIDE)
    brackets = b"".join(quoted.replace(b'""', b"").split(b'"')[::2])
    for _ in range(MAX_DEPTH):  # each pass removes the innermost level
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
    if brackets:
        raise Refused(400, "E736", f"the JSON is nested deeper than {MAX_DEPTH} levels, or its brackets do not match")


def check_shapes(text: bytes) -> None:
    """Raise Refused for JSON with a `shape` of more than MAX_ELEMENTS elements."""
    if LONG not in text.translate(DIGITS):
        return
    try:
        json.loads(text.decode(), object_pairs_hook=_check_pairs)
    except ValueError:
        raise Refused(400, "E736", "the body is not JSON") from None


def _check_pairs(pairs: list[tuple[str, Any]]) -> None:
    """Every `shape` of an object, for of two with one name Triton takes the first, and Python the last."""
    for name, shape in pairs:
        if name == "shape" and isinstance(shape, list):
            sizes = [size for size in shape if isinstance(size, int)]
            if max(map(abs, sizes), default=0) > MAX_ELEMENTS or abs(math.prod(sizes)) > MAX_ELEMENTS:
                raise Refused(400, "E736", f"a tensor has more than {MAX_ELEMENTS} elements")
