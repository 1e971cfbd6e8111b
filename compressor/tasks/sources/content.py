"""The content of a data file: of bounded size, decompressed, with lines of bounded length, in UTF-8."""

from __future__ import annotations

import zlib
from pathlib import Path

from compressor.errors import UserError
from compressor.tasks import PACKED, PARQUET, ending
from compressor.text_files import FileKind, decode, in_units, read_bytes, too_large

WHERE_PATHS_BEGIN = "Paths are relative to the pipeline file, those of --set to the current folder"
DATA = FileKind(
    noun="data file",
    most=512 * 1024**2,
    missing=("E201", WHERE_PATHS_BEGIN),
    folder=("E202", "Name a .csv, .tsv, .jsonl, .parquet or .conll file"),
    size=("E215", "Take a part of its rows: all are held in memory"),
    encoding="E203",
)
MOST_OF_A_ROW = 16 * 1024**2
"""Longest row, in bytes of a line or characters of all its cells: a longer one is a file without line ends, or an error."""


def data_text(path: Path) -> str:
    """The text of a data file, decompressed if it is gzipped.

    Raises UserError E201, E202, E203, E215, E234 (a line that is too long), E236 (lines that end in CR alone).
    """
    content = data_bytes(path)
    _require_lines(content, path)
    text = decode(content, DATA.encoding, str(path))
    if "\r" in text and "\n" not in text and ending(path) != ".csv":  # CSV may end its lines so
        fix = r"Convert it: tr '\r' '\n' < OLD > NEW"
        raise UserError("E236", "the lines end in CR alone, as on old Macs: all is one line", fix, f"{path}:1")
    return text


def data_bytes(path: Path) -> bytes:
    """The bytes of a data file, decompressed if it is gzipped. Raises UserError E201, E202, E215, E234."""
    content = read_bytes(path, DATA)
    return _unpacked(content, path) if path.suffix == PACKED else content


def row_too_long(size: int, where: str) -> UserError:
    """The error for a row of `size` bytes or characters, or of more."""
    what = f"a row of {in_units(size)} or more, where one has at most {in_units(MOST_OF_A_ROW)}"
    return UserError("E234", what, "Check the line ends and the quotes, or split the text into several rows", where)


def _require_lines(content: bytes, path: Path) -> None:
    """Raise UserError E234 for a line longer than MOST_OF_A_ROW, before anything is made of it."""
    start = 0
    while len(content) - start > MOST_OF_A_ROW:
        end = content.rfind(b"\n", start, start + MOST_OF_A_ROW + 1)
        if end < 0:
            end = content.find(b"\n", start)
            line = content.count(b"\n", 0, start) + 1
            raise row_too_long((end if end >= 0 else len(content)) - start, f"{path}:{line}")
        start = end + 1


def _unpacked(packed: bytes, path: Path) -> bytes:
    """Decompress gzip data and check its checksums. Stops at the first block that shows the content to be too large.

    Raises UserError E201 for damaged data, E215 if it is too large, E234 for a line that is too long.
    """
    parts, size, lines, unfinished = [], 0, 0, 0
    while packed:  # a gzip file may consist of several members
        reader = zlib.decompressobj(wbits=31)
        while not reader.eof:
            try:
                part = reader.decompress(packed, min(MOST_OF_A_ROW, DATA.most + 1 - size))
            except zlib.error as error:
                raise UserError("E201", f"cannot be decompressed ({error})", "Copy the file again", str(path)) from None
            packed = reader.unconsumed_tail
            if not part and not packed and not reader.eof:
                raise UserError("E201", "cannot be decompressed (cut short)", "Copy the file again", str(path))
            parts.append(part)
            size += len(part)
            if size > DATA.most:
                raise too_large(size, DATA, str(path))
            # bytes since the last line end
            unfinished = len(part) - part.rfind(b"\n") - 1 + (0 if b"\n" in part else unfinished)
            lines += part.count(b"\n")
            if unfinished > MOST_OF_A_ROW and ending(path) != PARQUET:
                raise row_too_long(unfinished, f"{path}:{lines + 1}")
        packed = reader.unused_data
    return b"".join(parts)
