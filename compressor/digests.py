"""sha256 of file contents: the only way in which content is compared in this project."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

Result = TypeVar("Result")

SETTLED_NS = 2 * 10**9
"""Age of a file's last change from which on another change is sure to show: clocks of file systems are coarse."""


class Mark(NamedTuple):
    """File system metadata of a file. The time of its last change (ctime) cannot be set by a program."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


def mark_of(path: Path) -> Mark | None:
    """The mark of a file; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return Mark(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def settled(marks: Iterable[Mark], now: int) -> bool:
    """Whether the files with these marks, read at `now` (ns), are old enough for each later change to show in the mark."""
    return all(now - mark.ctime_ns > SETTLED_NS for mark in marks)


def kept_by_files(
    files: Callable[..., Iterable[Path]], most: int | None = None
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Decorator of a function of the content of some files, which `files` gives from its arguments: it is computed once in this
    process for as long as these files keep their marks. Arguments are told apart by their repr; those by keyword, which may
    not change the result, are not.

    Only the last `most` results are held: where there are as many, the oldest is dropped before the next one is computed.

    For what many stages and many runs of one process read, such as a sweep's trials; a run hashes its inputs itself before it
    publishes. A result is shared by all callers, which must not change it.
    """

    def decorated(function: Callable[..., Result]) -> Callable[..., Result]:
        kept: dict[str, tuple[list[Mark], Result]] = {}

        def marks_of(arguments: tuple) -> list[Mark | None]:
            return [mark_of(path) for path in files(*arguments)]

        @functools.wraps(function)
        def call(*arguments, **options) -> Result:
            key, marks, now = repr(arguments), marks_of(arguments), time.time_ns()
            if key in kept and kept[key][0] == marks:
                return kept[key][1]
            kept.pop(key, None)
            while most is not None and len(kept) >= most:
                del kept[next(iter(kept))]
            result = function(*arguments, **options)
            if None not in marks and marks_of(arguments) == marks and settled(marks, now):
                kept[key] = marks, result
            return result

        return call

    return decorated


kept_while_unchanged = kept_by_files(lambda path: (path,))
"""Decorator of a function of one file's content, computed once in this process for as long as the file keeps its mark."""


def sha256_of(path: Path) -> str:
    """sha256 of a file's content, in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


sha256_kept = kept_while_unchanged(sha256_of)
"""The same, computed once in this process for as long as the file is unchanged."""
