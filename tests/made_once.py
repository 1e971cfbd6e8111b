"""What all workers of a session of tests share: made by the one that needs it first, while the others wait."""

import os
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def made_once(own: Path, name: str, make: Callable[[Path], None]) -> Path:
    """The folder of a name, which `make` has filled; `own` is the worker's folder (`tmp_path_factory.getbasetemp()`)."""
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name
    done = folder.with_name(f"{name}.done")
    with FileLock(f"{folder}.lock"):
        if not done.exists():
            folder.mkdir()
            make(folder)
            done.touch()
    return folder
