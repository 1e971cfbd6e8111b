"""Handling of unexpected errors: one line for the user, and the traceback in a file."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from compressor.errors import CompressError, UserError
from compressor.memory_faults import memory_fault
from pipelines.engine.disk import disk_fault, shortened
from pipelines.engine.environment import PROJECT


def coded(error: BaseException, doing: str, folders: Sequence[Path] = (), out: Path | None = None) -> CompressError:
    """Convert to a coded error: the error itself, E804, E801 (disk), E908 (memory), E901 (a package is missing), or E899 with
    its traceback in a file.

    `doing` names what failed; the file is written to the first writable folder of `folders`, the user's state folder and the
    temporary folder.
    """
    if fault := disk_fault(error, out):
        return fault
    if isinstance(error, CompressError):
        return error
    if used_up := memory_fault(error):
        return used_up
    if missing := _package_fault(error, doing):
        return missing
    path = write_traceback(error, [*folders, *_usual_folders()])
    where = f"its traceback is in {path}" if path else "its traceback could not be written anywhere"
    reason = f"{type(error).__name__}: {error}".removesuffix(": ")
    return CompressError("E899", f"{doing} failed unexpectedly ({shortened(reason)})", f"This is a bug; {where}")


MODULES = {"google": "protobuf", "google.protobuf": "protobuf", "yaml": "pyyaml"}
"""Module -> the package of another name that has it."""


def _package_fault(error: BaseException, doing: str) -> UserError | None:
    """E901 where a package is not installed that comes with this project, None for any other error."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    package = MODULES.get(error.name, error.name.replace("_", "-"))
    try:
        lines = importlib.metadata.requires(PROJECT) or ()
    except importlib.metadata.PackageNotFoundError:  # run from its source
        return None
    for line in lines:
        if re.match(r"[A-Za-z0-9._-]+", line)[0] == package and ";" not in line:  # behind one stands the extra that needs it
            return UserError("E901", f"{doing} needs the package {package}", f"Run: pip install {shlex.quote(line)}")
    return None


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
