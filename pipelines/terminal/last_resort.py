"""Handling of unexpected errors: one line for the user, and the traceback in a file."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from compressor.errors import CompressError
from pipelines.engine.disk import disk_fault, shortened
from pipelines.engine.memory import memory_fault


def coded(error: BaseException, doing: str, folders: Sequence[Path] = (), out: Path | None = None) -> CompressError:
    """Convert to a coded error: the error itself, E804, E801 (disk), E908 (memory), or E899 with its traceback in a file.

    `doing` names what failed; the file is written to the first writable folder of `folders`, the user's state folder and the
    temporary folder.
    """
    if fault := disk_fault(error, out):
        return fault
    if isinstance(error, CompressError):
        return error
    if used_up := memory_fault(error):
        return used_up
    path = write_traceback(error, [*folders, *_usual_folders()])
    where = f"its traceback is in {path}" if path else "its traceback could not be written anywhere"
    reason = f"{type(error).__name__}: {error}".removesuffix(": ")
    return CompressError("E899", f"{doing} failed unexpectedly ({shortened(reason)})", f"This is a bug; {where}")


def _usual_folders() -> list[Path]:
    state = os.environ.get("XDG_STATE_HOME")
    try:
        return [*([Path(state) / "compress"] if state else []), Path(tempfile.gettempdir())]
    except OSError:  # no folder is writable
        return []


def write_traceback(error: BaseException, folders: Sequence[Path]) -> Path | None:
    """Write the error's traceback into the first writable folder; None where there is none."""
    text = "".join(traceback.format_exception(error)).encode("utf-8", "backslashreplace")
    for folder in folders:
        path = folder / f"compress-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)
        except (OSError, ValueError):
            continue
        return path
    return None
