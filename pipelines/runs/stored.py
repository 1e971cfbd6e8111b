"""What the store of a folder of runs holds, which runs use it, and the removal of what none uses."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from compressor.errors import UserError
from compressor.run_store import LOCK_FILE, RUN_FILE, STORE
from pipelines.engine.attempt import last_attempt
from pipelines.engine.lockfile import read_lock
from pipelines.engine.store import Locked, Store, lock

ARTIFACT, UNFINISHED, CACHE = "artifact", "interrupted training", "cache"
NAME = re.compile(r"[a-z_]+-[0-9a-f]{16}")
"""Name of an artifact's folder; whatever else lies in a store is a user's own, and stays."""
SEAL, WAIT = ".sha256", ".lock"
"""Endings of what lies beside a result in the cache."""


@dataclass(frozen=True)
class Stored:
    """One result in a store. `runs` are the names of the runs that use it, `days` the time since it was written."""

    kind: str
    name: str
    bytes: int
    days: float
    runs: tuple[str, ...] = ()


def stored(out: Path) -> list[Stored]:
    """All results in the store of the runs below `out`, the largest first.

    Raises UserError E805 (no store there), E803 and E801 (a run's files cannot be read: nobody knows what it uses).
    """
    root = out / STORE
    if not root.is_dir():
        raise UserError("E805", "no store of runs here", "Give the folder of the runs: --out runs", str(out))
    users = _users(out)
    rows = [
        *(_row(ARTIFACT, path.name, [path], users.get(path.name, ())) for path in root.iterdir() if NAME.fullmatch(path.name)),
        *(_row(UNFINISHED, path.name.partition("-")[2], [path]) for path in root.glob(".unfinished-*")),
        *(_row(CACHE, path.name, [path, path.with_suffix(SEAL)]) for path in _cached(Store(root))),
    ]
    return sorted(rows, key=lambda row: (-row.bytes, row.name))


def unused(rows: Iterable[Stored], *, caches: bool = False) -> list[Stored]:
    """Those that no run uses: artifacts and interrupted trainings, or the `caches`, which any run may use again."""
    return [row for row in rows if not row.runs and (row.kind == CACHE) == caches]


def remove(out: Path, rows: Sequence[Stored]) -> Iterator[tuple[Stored, bool]]:
    """Remove results from the store below `out`; yields each with whether it is gone: what a running process uses stays.

    Raises UserError E801 where the store cannot be written.
    """
    root = out / STORE
    for row in rows:
        try:
            with contextlib.ExitStack() as held:
                held.enter_context(lock(_lock_of(root, row)))
                if row.kind == ARTIFACT:
                    held.enter_context(lock(root / f".used-{row.name}"))
                for path in _paths(root, row):
                    _discard(path, root)
        except Locked:
            yield row, False
        except OSError as error:
            fix = "Change its permissions, or let its owner remove it"
            raise UserError("E801", f"cannot be removed ({error.strerror or error})", fix, str(root / row.name)) from None
        else:
            yield row, True


def _users(out: Path) -> dict[str, list[str]]:
    """The names of the runs that use each artifact: by the last run that finished, and by the last attempt."""
    users: dict[str, list[str]] = defaultdict(list)
    for folder in _runs(out):
        attempt, path = last_attempt(folder), folder / LOCK_FILE
        names = {stage["artifact"] for stage in read_lock(path)["stages"]} if path.is_file() else set()
        names |= {stage.artifact for stage in attempt.stages} if attempt else set()
        for name in names:
            users[name].append(str(folder.relative_to(out)))
    return users


def _runs(out: Path) -> Iterator[Path]:
    """The folders of runs, and of a sweep's trials, which are one deeper. Raises UserError E801 for one that cannot be read."""
    for folder in (inner for outer in _folders(out) for inner in (outer, *_folders(outer))):
        try:
            if any((folder / name).is_file() for name in (RUN_FILE, LOCK_FILE)):
                yield folder
        except PermissionError as error:
            raise _unreadable(folder, error) from None


def _folders(above: Path) -> list[Path]:
    try:
        return sorted(path for path in above.iterdir() if path.name != STORE and path.is_dir())
    except PermissionError as error:
        raise _unreadable(above, error) from None


def _unreadable(folder: Path, error: OSError) -> UserError:
    what = f"cannot be read ({error.strerror}): which results it uses is not known"
    return UserError("E801", what, "Change its permissions, or ask its owner", str(folder))


def _cached(store: Store) -> list[Path]:
    return [path for path in store.cache.glob("*") if path.suffix not in (SEAL, WAIT)]


def _row(kind: str, name: str, places: Sequence[Path], runs: Sequence[str] = ()) -> Stored:
    """Sizes and times of what other processes may just be removing: a file that is gone counts nothing."""
    count, latest = 0, 0.0
    for path in (path for place in places for path in (place, *place.rglob("*"))):
        with contextlib.suppress(FileNotFoundError):
            facts = path.lstat()
            count += 0 if path.is_dir() else facts.st_size
            latest = max(latest, facts.st_mtime)
    return Stored(kind, name, count, max(time.time() - latest, 0) / 86400, tuple(runs))


def _lock_of(root: Path, row: Stored) -> Path:
    """The lock that whoever makes a result holds."""
    return (Store(root).cache / row.name).with_suffix(WAIT) if row.kind == CACHE else root / f".lock-{row.name}"


def _paths(root: Path, row: Stored) -> list[Path]:
    """A result's paths, its seal first: without that a cached one is not taken."""
    if row.kind == CACHE:
        path = Store(root).cache / row.name
        return [path.with_suffix(SEAL), path]
    return [root / (row.name if row.kind == ARTIFACT else f".unfinished-{row.name}")]


def _discard(path: Path, root: Path) -> None:
    """Remove a file, or a folder: it leaves its place in one step, for half an artifact would be a damaged one."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    for folder in (path, *(each for each in path.rglob("*") if each.is_dir())):
        if not os.access(folder, os.W_OK | os.X_OK):  # asked before the first step: it would fail in the middle
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    old = Path(tempfile.mkdtemp(prefix=f".old-{path.name.lstrip('.')}-", dir=root))
    path.rename(old)
    shutil.rmtree(old)
