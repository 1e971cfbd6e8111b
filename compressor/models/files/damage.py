"""What is wrong with a folder of a model, and reading its JSON so that nothing in it can harm. Torch-free."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compressor.errors import CompressError, UserError

JSON_BYTES, JSON_DEPTH, DIGITS = 64 * 2**20, 32, 100
"""The largest JSON file that is read, its deepest nesting, and the digits of its longest integer: tokenizers write 10^30."""


class Damage(Exception):
    """A fault of a model folder (a predicate: "has no config.json") and its fix, before it gets an error code."""

    def __init__(self, what: str, fix: str = "Save or download the folder again"):
        self.what, self.fix = what, fix
        super().__init__(what)


class Lacking(Damage):
    """Tensors of the model are in none of its files."""


@contextmanager
def door(code: str, subject: str, where: str = "") -> Iterator[None]:
    """Convert any Damage to a UserError with this code whose message begins with `subject`."""
    try:
        yield
    except Damage as damage:
        raise UserError(code, f"{subject} {damage.what}", damage.fix, where) from None


@contextmanager
def reading_by_library(what: str, fix: str = "Save or download the folder again") -> Iterator[None]:
    """Convert any library error on an untrusted file to Damage with `what` and the library's reason."""
    try:
        yield
    except (CompressError, Damage):
        raise
    except BaseException as error:  # transformers and its dependencies raise any type; a Rust panic is not an Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise Damage(f"{what} ({reason_of(error)})", fix) from error


def fix_of_format(number: object, newest: int) -> str:
    """What to do about a file whose format `number` is not read, where this version writes the `newest`."""
    if type(number) is int and number > newest:
        return "A newer version made it: upgrade this one, or create it again with this version"
    return "Create it again with this version"


def reason_of(error: BaseException) -> str:
    """A library's error as one short line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__


def shown(value: Any) -> str:
    """A value of an untrusted file in a short line."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of plain UTF-8, nested JSON_DEPTH deep at most, its numbers finite and of DIGITS digits at most.

    Raises Damage.
    """
    try:
        size = path.stat().st_size
        raw = path.read_bytes() if size <= JSON_BYTES else None
    except OSError as error:
        raise Damage(f"has a {path.name} that cannot be read ({error.strerror})") from None
    if raw is None:
        raise Damage(f"has a {path.name} of {size:,} bytes; at most {JSON_BYTES:,} are read")
    content = _parsed(_text(raw, path.name), path.name)
    if not isinstance(content, dict):
        raise Damage(f"has a {path.name} that is no JSON object but {_KINDS.get(type(content), 'a number')}")
    if _deeper_than(content, JSON_DEPTH):
        raise Damage(f"has a {path.name} that is nested more than {JSON_DEPTH} deep")
    return content


_KINDS = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
_MARKS = {b"\xef\xbb\xbf": "a byte order mark", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def _text(raw: bytes, name: str) -> str:
    for mark, encoding in _MARKS.items():
        if raw.startswith(mark):
            raise Damage(f"has a {name} with {encoding} at its start", "Save it as UTF-8 without a byte order mark")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Damage(f"has a {name} that is not UTF-8 (byte {error.start:,})", "Save it as UTF-8") from None


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text, parse_int=_integer, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise Damage(f"has a {name} that is nested more than {JSON_DEPTH} deep") from None
    except json.JSONDecodeError as error:
        raise Damage(f"has a {name} that is not JSON (line {error.lineno}: {error.msg})") from None
    except ValueError as error:  # of _whole and _finite
        raise Damage(f"has a {name} with {error}") from None


def _integer(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"a whole number of {len(digits):,} digits")
    return int(digits)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:20]}, which is not finite")
    return number


def _deeper_than(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most):
        level = [inner for item in level if isinstance(item, (dict, list)) for inner in _inside(item)]
        if not level:
            return False
    return any(isinstance(item, (dict, list)) for item in level)


def _inside(value: dict | list) -> Iterator[Any]:
    yield from value.values() if isinstance(value, dict) else value
