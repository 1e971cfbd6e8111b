"""Lock files of folders that several users share."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from compressor.errors import UserError

WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a file system without locks answers: NFS 3 without `lockd`, Lustre without the option `flock`, storages of objects."""


def open_lock(path: Path) -> int:
    """A handle of the file at `path` to be locked, which is made if it is missing; for writing, too, where that is allowed.

    Another user's file may be open to reading alone, and a local disk asks no more of who locks it.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)


def lock_where_possible(handle: int, operation: int) -> None:
    """`fcntl.flock` of what is only marked as in use by it: nothing where the file system has no locks."""
    try:
        fcntl.flock(handle, operation)
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise


def take_lock(handle: int, operation: int, path: Path) -> None:
    """`fcntl.flock` of a handle of the file at `path`. Raises UserError E801 where its file system has no locks."""
    try:
        fcntl.flock(handle, operation)
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        what = f"this file system has no locks ({os.strerror(error.errno)})"
        fix = "Choose a folder on another file system (docs/sweeps.md, Locks)"
        raise UserError("E801", what, fix, str(path.parent)) from error
