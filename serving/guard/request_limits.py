"""What a request may be before Triton sees it: the size of its body, also when uncompressed, its JSON's depth, and shapes."""

from __future__ import annotations

import re
import zlib
from itertools import accumulate

MAX_DEPTH = 64
"""Nested lists and objects in JSON. Triton parses recursively: 60,000 levels end it. A tensor needs as many as it has axes."""

SHAPE = re.compile(
    r'"{}"\s*:\s*\[([^]]*)'.format("".join(rf"(?:{letter}|\\u00{ord(letter):x})" for letter in "shape")).encode()
)
"""A `shape` and its sizes, also where letters of the key are escaped. In a string the quotes would be escaped, too."""
SIZE = re.compile(rb"\d{1,20}")
OUTSIDE = bytes(set(range(256)) - set(b'[]{}"'))
"""What says nothing about nesting."""
STEPS = dict(zip(b"[{]}", (1, 1, -1, -1), strict=True))
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
    """Raise Refused for JSON that is nested deeper than MAX_DEPTH."""
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return
    quoted = text.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, OUTSIDE)
    brackets = b"".join(quoted.replace(b'""', b"").split(b'"')[::2])
    # whether they match is of no account: where one does not, a parser stops
    if max(accumulate(map(STEPS.__getitem__, brackets)), default=0) > MAX_DEPTH:
        raise Refused(400, "E736", f"the JSON is nested deeper than {MAX_DEPTH} levels")


def check_shapes(text: bytes, length: int) -> None:
    """Raise Refused for JSON with a `shape` of more than MAX_DEPTH axes, or of more elements than the body's `length` in bytes.

    Triton reserves memory for as many elements as a shape says before it sees whether they came: too many end it, and a
    product beyond 64 bits the process of a model. In a body each element has at least one byte.
    """
    for shape in SHAPE.finditer(text):
        elements = 1
        for axis, size in enumerate(SIZE.finditer(shape[1])):
            elements *= max(int(size[0]), 1)  # Triton multiplies the other sizes of an empty tensor, too
            if elements > length or axis == MAX_DEPTH:
                what = f"a tensor has more than {MAX_DEPTH} axes, or more elements than the body has bytes"
                raise Refused(400, "E736", what)
