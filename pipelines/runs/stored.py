"""What the store of a folder of runs holds, which runs use it, and the removal of what none uses."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from compressor.digests import kept_while_unchanged
from compressor.errors import UserError
from compressor.run_store import LOCK_FILE, RUN_FILE, STORE
from pipelines.engine.attempt import last_attempt
from pipelines.engine.lockfile import ARTIFACT_NAME, read_lock
from pipelines.engine.store import ASIDE, Locked, Store, lock, served_lock, set_aside, used_lock

ARTIFACT, UNFINISHED, WORK, CACHE = "artifact", "interrupted training", "unfinished work", "cache"
"""Kinds of results. Unfinished work is that of a running process, or what a killed one left, from which nothing goes on."""
NO_RUNS = (STORE, "lost+found")
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


@dataclass(frozen=True)
class Contents:
    """What a store holds, the largest first; `unread` is why it is not known of all runs what they use, if it is not."""

    rows: Sequence[Stored]
    unread: UserError | None = None


def stored(out: Path) -> Contents:
    """All results in the store of the runs below `out`. Raises UserError E805 where there is no store."""
    root = out / STORE
    if not root.is_dir():
        raise UserError("E805", "no store of runs here", "Give the folder of the runs: --out runs", str(out))
    users, unread = _users(out)
    rows = [
        *(
            _row(root, ARTIFACT, path.name, users.get(path.name, ()))
            for path in root.iterdir()
            if re.fullmatch(ARTIFACT_NAME, path.name)
        ),
        *(_row(root, UNFINISHED, path.name.partition("-")[2]) for path in root.glob(".unfinished-*")),
        *(_row(root, WORK, path.name) for path in (*root.glob(".work-*"), *root.glob(f"{ASIDE}*"))),
        *(_row(root, CACHE, path.name) for path in _cached(Store(root))),
    ]
    return Contents(sorted(rows, key=lambda row: (-row.bytes, row.name)), unread)


def unused(rows: Iterable[Stored], *, caches: bool = False) -> list[Stored]:
    """Those that no run uses: artifacts, interrupted trainings and unfinished work, or the `caches`, which any run may use
    again."""
    return [row for row in rows if not row.runs and (row.kind == CACHE) == caches]


def remove(out: Path, rows: Sequence[Stored], days: float = 0) -> Iterator[tuple[Stored, str]]:
    """Remove results from the store below `out`; yields each with why it stays, '' for one that is gone.

    What runs use and what is younger than `days` is looked at again for each of them, where no process can begin to use it:
    others before it take minutes to remove, in which a run may finish that uses it, or make it anew.
    """
    for row in rows:
        try:
            reason = _removed(out, row, days)
        except Locked:
            reason = "in use by a running process"
        except OSError as error:
            reason = f"{error.strerror or error}: its owner may remove it"
        yield row, reason


def _removed(out: Path, row: Stored, days: float) -> str:
    """Remove a result, or say why it stays. Raises Locked, OSError."""
    root = out / STORE
    with contextlib.ExitStack() as held:
        held.enter_context(lock(_lock_of(root, row)))
        if row.kind == ARTIFACT:
            held.enter_context(lock(used_lock(root, row.name)))
            held.enter_context(lock(served_lock(root, row.name)))
        if reason := _used_or_young(out, row, days):
            return reason
        for path in _paths(root, row.kind, row.name):
            _discard(path, root)
    return ""


def _used_or_young(out: Path, row: Stored, days: float) -> str:
    """Why a result is not to be removed any more, '' where it is."""
    users, unread = _users(out) if row.kind == ARTIFACT else ({}, None)
    if unread:
        return f"{unread.where}: {unread.what}"
    if runs := users.get(row.name):
        return f"used again by {runs[0]}"
    changed = row.kind != WORK and _row(out / STORE, row.kind, row.name).days < days
    return f"younger than {days:g} days by now" if changed else ""


def _users(out: Path) -> tuple[dict[str, list[str]], UserError | None]:
    """The names of the runs that use each artifact, by the last run that finished and by the last attempt; and the first fault
    of a run that cannot be read."""
    users: dict[str, list[str]] = defaultdict(list)
    faults: list[UserError] = []
    for folder in (inner for outer in _folders(out, faults) for inner in (outer, *_folders(outer, faults))):
        try:
            # its artifacts, and its base model where that is one, made by another run; none where no run has been
            for name in _in_attempt(folder / RUN_FILE) | _in_lock(folder / LOCK_FILE):
                users[name].append(str(folder.relative_to(out)))
        except UserError as error:
            faults.append(error)
        except PermissionError as error:
            faults.append(_closed(folder, error))
    return users, faults[0] if faults else None


@kept_while_unchanged
def _in_attempt(path: Path) -> frozenset[str]:
    attempt = last_attempt(path.parent)
    if attempt is None:
        return frozenset()
    # the name alone, which tells the content: the store may have another path by now
    return frozenset({Path(attempt.model_folder).name, *(stage.artifact for stage in attempt.stages)})


@kept_while_unchanged
def _in_lock(path: Path) -> frozenset[str]:
    if not path.is_file():
        return frozenset()
    lock_file = read_lock(path)
    return frozenset({lock_file["model"].get("artifact", ""), *(stage["artifact"] for stage in lock_file["stages"])})


def _folders(above: Path, faults: list[UserError]) -> list[Path]:
    """The folders in one, in which runs may be, or trials of a sweep; what cannot be read is added to `faults`."""
    try:
        inside = sorted(path for path in above.iterdir() if path.name not in NO_RUNS)
        away = [path for path in inside if path.is_symlink() and not path.exists()]
        folders = [path for path in inside if path.is_dir()]
    except FileNotFoundError:  # another process has just removed it
        return []
    except PermissionError as error:
        faults.append(_closed(above, error))
        return []
    faults += [_closed(path, FileNotFoundError(errno.ENOENT, "a link to what is not there")) for path in away]
    return folders


def _closed(folder: Path, error: OSError) -> UserError:
    what = f"cannot be read ({error.strerror}): which results it uses is not known"
    return UserError("E801", what, "Make it readable, or move it away", str(folder))


def _cached(store: Store) -> list[Path]:
    return [path for path in store.cache.glob("*") if path.suffix not in (SEAL, WAIT)]


def _row(root: Path, kind: str, name: str, runs: Sequence[str] = ()) -> Stored:
    """Sizes and times of what other processes may just be removing: a file that is gone counts nothing."""
    count, latest = 0, 0.0
    for path in (path for place in _paths(root, kind, name) for path in _all_of(place)):
        with contextlib.suppress(FileNotFoundError, PermissionError):
            facts = path.lstat()
            count += 0 if stat.S_ISDIR(facts.st_mode) else facts.st_size
            latest = max(latest, facts.st_mtime)
    return Stored(kind, name, count, max(time.time() - latest, 0) / 86400, tuple(runs))


def _all_of(place: Path) -> Iterator[Path]:
    """A file, or a folder with all below it. `os.walk` passes over a folder that goes meanwhile, `rglob` raises."""
    yield place
    for folder, folders, files in os.walk(place):
        yield from (Path(folder, name) for name in (*folders, *files))


def _lock_of(root: Path, row: Stored) -> Path:
    """The lock that whoever makes a result holds."""
    if row.kind == CACHE:
        return (Store(root).cache / row.name).with_suffix(WAIT)
    return root / f".lock-{row.name.partition('-')[2] if row.kind == WORK else row.name}"


def _paths(root: Path, kind: str, name: str) -> list[Path]:
    """A result's paths, its seal first: without that a cached one is not taken."""
    if kind == CACHE:
        path = Store(root).cache / name
        return [path.with_suffix(SEAL), path]
    return [root / (f".unfinished-{name}" if kind == UNFINISHED else name)]


def _discard(path: Path, root: Path) -> None:
    """Remove a file, or a folder, which leaves its place in one step."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    for folder in (each for each in _all_of(path) if each.is_dir()):
        if not os.access(folder, os.W_OK | os.X_OK):  # asked before the first step: it would fail in the middle
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    gone = path if path.name.startswith(ASIDE) else set_aside(path, root)
    shutil.rmtree(gone, ignore_errors=True)  # a run that begins removes it, too; on NFS what another program has open stays
