"""Opening the lock files of folders that several users share."""

from __future__ import annotations

import os
from pathlib import Path


def open_lock(path: Path) -> int:
    """A handle of the file at `path` to be locked, which is made if it is missing; for writing, too, where that is allowed.

    Another user's file may be open to reading alone, and a local disk asks no more of who locks it.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
