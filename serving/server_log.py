"""The logs of a server's processes: what these say of requests is no other user's business."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import BinaryIO

from compressor.errors import UserError
from serving.server_registry import CACHE_FIX


def open_log(path: Path) -> BinaryIO:
    """A log to append to. It, and its folder, are made where they are missing: they may have been cleaned away, or the log
    rotated, while the server runs.

    Raises UserError E710 where that is not possible; OSError where the disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab")
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        what = f"the server's log cannot be written ({error.strerror})"
        raise UserError("E710", what, CACHE_FIX, str(path)) from error
