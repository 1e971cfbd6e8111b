"""Folders that are written whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SCRATCH = ".writing-"
"""Beginning of the name of a folder that is being written; one that was killed leaves it."""


@contextmanager
def becoming(out: Path) -> Iterator[Path]:
    """A new folder whose content becomes that of `out`, in place of the files that are there, if no error occurs.

    Raises OSError where nothing can be written.
    """
    # a folder that is there stays: it may be the current one, a link or a mount
    place = out if out.is_dir() else out.absolute().parent
    place.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=place))
    try:
        made.chmod(0o755)
        yield made
        _put(made, out)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _put(made: Path, out: Path) -> None:
    """Move a folder to `out`, or its content to the folder that is there and holds it, in place of everything else."""
    if not out.is_dir():
        made.rename(out)
        return
    for path in out.iterdir():
        if path.name != made.name:
            shutil.rmtree(path) if path.name.startswith(SCRATCH) else path.unlink()
    for path in made.iterdir():
        path.rename(out / path.name)
