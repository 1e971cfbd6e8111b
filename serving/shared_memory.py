"""/dev/shm, through which Triton and its model processes exchange tensors: is there enough, and what killed servers left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from pathlib import Path
from typing import IO

from compressor.errors import UserError

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "compress-triton-"
MOUNT_MORE = "Mount more (Docker: --shm-size=256m; Kubernetes: an emptyDir of medium Memory at /dev/shm)"
MORE_MEMORY = f"{MOUNT_MORE}, or lower --max-body or the models' instances"
INSTANCE_BYTES = 2 << 20
"""A model process starts with 1 MiB of its own and grows with its requests."""
MAX_BODY = 16 << 20
"""Bytes of the largest request, unless a server is started with another limit."""


def most_instances(max_body: int) -> int:
    """Model instances for which /dev/shm has space, beside one request of the largest size. Raises UserError E739."""
    return max(0, (_free(MORE_MEMORY) - max_body) // INSTANCE_BYTES)


def check_space(instances: int, max_body: int, fix: str = MORE_MEMORY) -> None:
    """Raise UserError E739 where /dev/shm lacks space for so many model instances and one request of the largest size."""
    needed, free = instances * INSTANCE_BYTES + max_body, _free(fix)
    if free < needed:
        what = f"{SHARED_MEMORY} has {free / 2**20:.1f} MiB free, and these models need {needed / 2**20:.0f} MiB"
        raise UserError("E739", what, fix)


def _free(fix: str) -> int:
    """Free bytes of /dev/shm. Raises UserError E739 where there is none."""
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        raise UserError("E739", f"there is no {SHARED_MEMORY} ({error.strerror})", fix) from error
    return status.f_bavail * status.f_frsize


def claim(stage: Path) -> IO[str]:
    """A lock that says that the server with the folder `stage` lives; close it last, after `remove`."""
    path = _lock_file(stage.name)
    path.touch(0o600, exist_ok=False)
    lock = path.open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    lock.write(str(stage))
    lock.flush()
    return lock


def close_to_others(name: str) -> None:
    """Make the shared memory of the server whose folder is called `name` readable by its user alone.

    Triton creates it readable by all, whatever the umask; a region that grows keeps its mode.
    """
    for region in SHARED_MEMORY.glob(f"{name}-*"):
        with contextlib.suppress(OSError), _open_own(region) as file:
            os.fchmod(file.fileno(), 0o600)


def remove(name: str) -> None:
    """Delete the shared memory of the server whose folder is called `name`, and its lock file."""
    remove_regions(name)
    _lock_file(name).unlink(missing_ok=True)


def remove_regions(name: str) -> None:
    """Delete the shared memory of a server that is started again."""
    for region in SHARED_MEMORY.glob(f"{name}-*"):
        with contextlib.suppress(OSError):  # another user's
            region.unlink()


def remove_left_overs() -> None:
    """Delete shared memory and folders of this user's servers that were killed: those whose lock nobody holds."""
    for path in SHARED_MEMORY.glob(f"{PREFIX}*.lock"):
        with contextlib.suppress(OSError), _open_own(path) as lock:  # another user's, or just deleted
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            stage = Path(lock.read())
            if stage.name == path.stem:
                remove(path.stem)
                shutil.rmtree(stage, ignore_errors=True)


def _open_own(path: Path) -> IO[str]:
    """Open a regular file of this user. Raises OSError for what others can put here: to open a pipe would wait, and to open a
    link would open another file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(descriptor)
        raise PermissionError(f"{path} is not a file of this user")
    return open(descriptor)


def _lock_file(name: str) -> Path:
    return SHARED_MEMORY / f"{name}.lock"
