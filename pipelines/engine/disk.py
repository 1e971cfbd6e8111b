"""The folder of runs, and coded errors for a full disk and a folder that cannot be written, from wherever they are raised."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from pathlib import Path

from compressor.errors import CompressError, UserError, causes_of

RUNS = Path("runs")
"""Where runs and their store are without --out."""

FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file would become larger than this process may write (ulimit -f)",
}
DENIED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)
WORDS = {
    errno.ENOSPC: r"No space left on device|os error 28\b|disk is full|PytorchStreamWriter failed writing|unexpected pos \d+",
    errno.EDQUOT: r"Disk quota exceeded|os error 122\b",
    errno.EFBIG: r"File too large|os error 27\b",
}
"""Messages of libraries that raise their own exceptions: torch, safetensors, sqlite, ONNX Runtime."""
NOTHING_LEFT = 2**16
"""If fewer bytes than this are free, an unexplained failure of a library is attributed to the full disk."""


def disk_fault(error: BaseException, folder: Path | None = None) -> UserError | None:
    """E804 for an error caused by a full disk, E801 for one by a missing permission or by the removal of a folder below
    `folder`, None for any other.

    `folder` is where files were written, reported if the error names no file. The cause and the context of an exception are
    examined, too: libraries and our own errors may wrap it.
    """
    if isinstance(error, CompressError) and error.code in ("E801", "E804"):
        return None  # already reported
    error = _plain(error)
    for cause in map(_plain, causes_of(error)):
        if (number := _full(cause)) is not None:
            return UserError("E804", FULL[number], "Free disk space; finished stages are kept", _place(cause, folder))
    if isinstance(error, CompressError):
        return None
    if isinstance(error, OSError) and error.errno in DENIED:
        what = f"cannot be written ({os.strerror(error.errno)})"
        return UserError("E801", what, "Change its permissions, or choose another folder", _place(error, folder))
    if isinstance(error, FileNotFoundError) and folder is not None and (removed := _removed(error, folder)):
        return UserError("E801", "was removed while it was used", "Run the same command again", shortened(str(removed)))
    return None


def require_writable(folder: Path, fix: str) -> None:
    """Raise UserError E801 unless a folder, which may be missing, can be written. Writes nothing."""
    try:
        existing = existing_part(folder)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError("E801", f"cannot be a folder ({reason})", fix, shortened(str(folder), 80)) from None
    if not existing.is_dir():
        raise UserError("E801", "a file, where a folder is needed", fix, str(existing))
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError("E801", "no permission to write here", fix, str(existing))


def existing_part(folder: Path) -> Path:
    """The folder itself, or its nearest parent that exists; a broken link does. Raises OSError or ValueError for a name that no
    file can have."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists() or path.is_symlink())


def nothing_left(folder: Path) -> UserError | None:
    """E804 where the disk of `folder` is full: native libraries then write incomplete files without an error."""
    existing = next((path for path in (folder, *folder.parents) if path.is_dir()), None)
    if existing is None or shutil.disk_usage(existing).free >= NOTHING_LEFT:
        return None
    return UserError("E804", FULL[errno.ENOSPC], "Free disk space; finished stages are kept", str(folder))


def shortened(text: str, most: int = 400) -> str:
    """The text on one line, with its middle left out if it is long."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most // 2]} ... {line[-most // 2 :]}"


def _plain(error: BaseException) -> BaseException:
    """The error; if tempfile found no folder to write to, which it says without a reason, the one met in the first of them; if
    a tree could not be copied for want of space, that of its first file, which shutil keeps as words."""
    if isinstance(error, shutil.Error) and (met := _met_in_a_copy(error)):
        return met
    if not (isinstance(error, FileNotFoundError) and "No usable temporary directory" in str(error)):
        return error
    try:
        with tempfile.TemporaryFile(dir=os.environ.get("TMPDIR") or "/tmp", buffering=0) as file:
            file.write(b"x")
    except OSError as reason:
        return reason
    return error


def _met_in_a_copy(error: shutil.Error) -> OSError | None:
    files = error.args[0] if error.args and isinstance(error.args[0], list) else []
    for source, target, words in files:
        number = re.match(r"\[Errno (\d+)\]", str(words))
        if number and int(number[1]) in FULL:
            return OSError(int(number[1]), os.strerror(int(number[1])), source, None, target)
    return None


def _full(error: BaseException) -> int | None:
    if isinstance(error, OSError):
        return error.errno if error.errno in FULL else None
    if isinstance(error, CompressError):  # its text may contain the user's data
        return None
    return next((number for number, words in WORDS.items() if re.search(words, str(error))), None)


def _removed(error: FileNotFoundError, folder: Path) -> Path | None:
    """The folder that was removed from under the file that an error names: `folder`, that of a run, its store, or one of their
    own. What is missing below these is another fault."""
    if not isinstance(error.filename, str | bytes):
        return None
    places = [place for place in reversed(Path(os.fsdecode(error.filename)).parents) if place.is_relative_to(folder)]
    return next((place for place in places[:3] if not place.exists()), None)


def _place(error: BaseException, folder: Path | None) -> str:
    """The file that was written; of a copy the second that the error names, after its source."""
    named = getattr(error, "filename2", None) or getattr(error, "filename", None)
    return shortened(os.fsdecode(named) if isinstance(named, str | bytes) else str(folder or ""))
