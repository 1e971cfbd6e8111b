"""Reading a user's text file: a regular file of bounded size, in UTF-8, or one clear error with the caller's codes."""

from __future__ import annotations

import codecs
import errno
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from compressor.errors import UserError

MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",  # UTF-32's mark begins with UTF-16's, so it comes first
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""Byte order marks of encodings other than UTF-8."""
WINDOWS = re.compile(rb"[\x80-\x9f]")
"""Bytes that are quotes, dashes and the euro in Windows' cp1252, and control characters in latin1."""
SAMPLE = 4096
"""Bytes at the start of a file that are used to detect UTF-16 without a mark."""
NO_SUCH = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)


@dataclass(frozen=True)
class FileKind:
    """A type of text file: its description, its largest size in bytes, and the codes of its possible errors."""

    noun: str
    most: int
    missing: tuple[str, str]
    """Error code and advice if the file is missing or cannot be read."""
    folder: tuple[str, str]
    """Error code and advice if it is a folder."""
    size: tuple[str, str]
    encoding: str


def from_home(path: str | Path) -> Path:
    """The path with ~ replaced by the home folder. Where there is no such user it stays as it is, and is missing like any other
    path: `Path.expanduser` raises RuntimeError."""
    return Path(os.path.expanduser(path))


def is_unicode(path: Path) -> bool:
    """Whether a path is UTF-8: safetensors and tokenizers open no other, and YAML holds no other."""
    try:
        return bool(str(path).encode())
    except UnicodeEncodeError:
        return False


def written_as_path(reference: object) -> bool:
    """Whether a reference, which might name something of a hub, begins as only paths do."""
    return isinstance(reference, str) and reference.startswith((".", "/", "~"))


def read_text(path: Path, kind: FileKind) -> str:
    """The text of a file without its byte order mark. Raises UserError with the codes of `kind`."""
    return decode(read_bytes(path, kind), kind.encoding, str(path))


def read_bytes(path: Path, kind: FileKind) -> bytes:
    """Read the bytes of a file.

    A pipe, a socket or a device is refused without opening it, because reading it may never end. Raises UserError with the
    codes of `kind`.
    """
    place, (code, advice) = str(path), kind.missing
    try:
        facts = os.stat(path)
        if stat.S_ISDIR(facts.st_mode):
            raise UserError(kind.folder[0], f"a folder, not a {kind.noun}", kind.folder[1], place)
        if not stat.S_ISREG(facts.st_mode):
            raise UserError(code, "not a regular file (a pipe, a socket or a device)", f"Copy it to a {kind.noun}", place)
        if facts.st_size > kind.most:
            raise too_large(facts.st_size, kind, place)
        with path.open("rb") as stream:
            content = stream.read(kind.most + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        number = getattr(error, "errno", errno.ENOENT)
        what = "no such file" if number in NO_SUCH else f"cannot be read ({getattr(error, 'strerror', error)})"
        raise UserError(code, what, advice if number in NO_SUCH else "Check its permissions", place) from None
    if len(content) > kind.most:  # the file grew, or its size is unknown
        raise too_large(len(content), kind, place)
    return content


def too_large(size: int, kind: FileKind, place: str) -> UserError:
    """The error for a file of `size` bytes."""
    code, advice = kind.size
    return UserError(code, f"{in_units(size)}, where a {kind.noun} has at most {in_units(kind.most)}", advice, place)


def in_units(size: int) -> str:
    """Format a size: 1536 -> '1.5 KiB'."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:,.4g} {unit}"
        size /= 1024


def decode(content: bytes, code: str, place: str) -> str:
    """Decode UTF-8 with or without a byte order mark. Raises UserError `code`, with the line of the first invalid byte."""
    if encoding := next((name for mark, name in MARKS.items() if content.startswith(mark)), None) or _unmarked(content):
        what, advice = f"{encoding[:6].upper()}, not UTF-8", f"Convert it: iconv -f {encoding} -t utf-8"
        raise UserError(code, what, advice, f"{place}:1")
    nul = content.find(b"\0")
    if nul >= 0:
        line = content.count(b"\n", 0, nul) + 1
        raise UserError(code, "a NUL byte, which no text holds", "Remove it, or name a text file", f"{place}:{line}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        encoding = "cp1252" if WINDOWS.search(content) else "latin1"
        raise UserError(code, "not UTF-8", f"Convert it: iconv -f {encoding} -t utf-8", f"{place}:{line}") from None


def _unmarked(content: bytes) -> str | None:
    """Detect UTF-16 without a byte order mark by its NULs: in Latin text every other byte is one."""
    sample = content[:SAMPLE]
    for start, name in ((1, "utf-16le"), (0, "utf-16be")):
        high, low = sample[start::2], sample[1 - start :: 2]
        if high and 2 * high.count(0) > len(high) and not low.count(0):
            return name
    return None
