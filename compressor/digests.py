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


def kept_while_unchanged(function: Callable[[Path], Result]) -> Callable[[Path], Result]:
    """A function of a file's content that is computed once in this process for as long as the file keeps its mark.

    For what many runs of one process read, such as a sweep's trials; a run hashes its inputs itself before it publishes.
    """
    kept: dict[Path, tuple[Mark, Result]] = {}

    @functools.wraps(function)
    def call(path: Path) -> Result:
        mark, now = mark_of(path), time.time_ns()
        if mark is not None and path in kept and kept[path][0] == mark:
            return kept[path][1]
        result = function(path)
        if mark is not None and mark_of(path) == mark and settled([mark], now):
            kept[path] = mark, result
        return result

    return call


def sha256_of(path: Path) -> str:
    """sha256 of a file's content, in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


sha256_kept = kept_while_unchanged(sha256_of)
"""The same, computed once in this process for as long as the file is unchanged."""
