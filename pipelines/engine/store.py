"""The artifact store: folders that are complete or absent, named by a fingerprint of everything that affects their content.

`DIR/.store/STAGE-FINGERPRINT/` holds a stage's files and `artifact.json`: kind, sha256 of every file, metadata; no time,
machine or absolute path, so that equal work gives equal bytes (states name their base as the pipeline did, which may be by an
absolute path). `artifact.sha256` holds its checksum, in the format of `sha256sum`. A stage works in `.work-*` beside it, and is
published by fsync and rename.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from compressor.digests import sha256_of
from compressor.errors import UserError
from compressor.locking import open_lock, take_lock
from compressor.run_store import MANIFEST
from pipelines.engine.stage import Artifact

SEAL = "artifact.sha256"


def canonical(value: Any) -> bytes:
    """Canonical JSON: sorted keys, no spaces, UTF-8. Equal values give equal bytes in every process."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def fingerprint(parts: dict[str, Any]) -> str:
    """sha256 over the canonical JSON of everything that affects an artifact's content."""
    return hashlib.sha256(canonical(parts)).hexdigest()


def digest(artifact: Artifact) -> str:
    """sha256 over kind, files and metadata: everything that a later stage can read from an artifact."""
    return fingerprint({"kind": artifact.kind, "files": artifact.files, "metadata": artifact.metadata})


class Locked(Exception):
    """Another process holds a lock; `pid` is the process id in the lock file."""

    def __init__(self, pid: str):
        super().__init__(pid)
        self.pid = pid


@contextlib.contextmanager
def lock(path: Path, on_wait: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hold the file at `path` as a process lock, and remove it afterwards.

    The kernel releases it when the process ends, in whatever way. When another process holds it: raises Locked, or, with
    `on_wait`, calls that with the holder's pid and waits.
    """
    handle = _opened(path, lambda handle: _acquire(handle, path, on_wait))
    try:
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_RDWR:  # another user's may be open to reading alone
            os.ftruncate(handle, 0)
            os.pwrite(handle, str(os.getpid()).encode(), 0)
        yield
    finally:
        with contextlib.suppress(PermissionError):  # a file that nobody locks is no obstacle
            path.unlink(missing_ok=True)
        os.close(handle)


@contextlib.contextmanager
def shared_lock(path: Path) -> Iterator[None]:
    """Hold the file at `path` together with other processes; `lock` of it waits for all of them. The last one removes it."""
    handle = _opened(path, lambda handle: take_lock(handle, fcntl.LOCK_SH, path))
    try:
        yield
    finally:
        with contextlib.suppress(BlockingIOError, PermissionError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        os.close(handle)


def _opened(path: Path, acquire: Callable[[int], None]) -> int:
    """A handle of the file at `path`, made if it is missing, once `acquire` has locked it and it still is the one at `path`."""
    while True:
        handle = open_lock(path)
        try:
            acquire(handle)
        except BaseException:
            os.close(handle)
            raise
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        os.close(handle)  # its holder deleted it between our open and our lock


def _acquire(handle: int, path: Path, on_wait: Callable[[str], None] | None) -> None:
    try:
        take_lock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, path)
    except BlockingIOError:
        pid = os.pread(handle, 32, 0).decode() or "unknown"
        if on_wait is None:
            raise Locked(pid) from None
        on_wait(pid)
        take_lock(handle, fcntl.LOCK_EX, path)


def used_lock(root: Path, name: str) -> Path:
    """The lock of an artifact in the store at `root` that whoever reads it shares, for `shared_lock`: until the last one ends
    no other process replaces or removes it."""
    return root / f".used-{name}"


ASIDE = ".old-"
"""How the names of folders begin that were taken out of the store."""


def set_aside(place: Path, root: Path) -> Path:
    """Take a folder out of the store at `root` in one step, for half an artifact would be a damaged one; returns where it is
    now, under a name of its own, as an earlier one may still be there. `Store.sweep` removes what a killed process left."""
    old = Path(tempfile.mkdtemp(prefix=f"{ASIDE}{place.name.lstrip('.')}-", dir=root))
    return place.rename(old)


def served_lock(root: Path, name: str) -> Path:
    """The lock of an artifact in the store at `root` that whoever serves it shares, for `shared_lock`: until the last one ends
    `compress store --remove-unused` leaves it. `--force` in another run, which cannot wait for as long, does not ask for it."""
    return root / f".served-{name}"


def write_atomic(path: Path, content: bytes) -> None:
    """Replace a file's content atomically: on failure it stays as it was."""
    replace_files({path: content})


def replace_files(contents: Mapping[Path, bytes]) -> None:
    """Replace several files, in order: all new content is on disk before the first file is replaced."""
    beside = {path: path.with_name(f".{path.name}.new") for path in contents}
    try:
        for path, content in contents.items():
            beside[path].write_bytes(content)
            _sync(beside[path])
        for path, new in beside.items():
            new.replace(path)
    except BaseException:
        for new in beside.values():
            with contextlib.suppress(OSError):  # what failed is told, not what cannot be removed behind it
                new.unlink(missing_ok=True)
        raise


def sealed(content: bytes, name: str = MANIFEST) -> bytes:
    """Checksum line of a file called `name`: `sha256sum -c artifact.sha256` checks that of a manifest, too."""
    return f"{hashlib.sha256(content).hexdigest()}  {name}\n".encode()


UNSYNCED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
"""What a file system answers that can sync files and no folders, such as a share of SMB."""


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in UNSYNCED or not path.is_dir():
            raise
    finally:
        os.close(handle)


KEEP_UNFINISHED = 7 * 24 * 3600
"""Seconds after which checkpoints of an interrupted training are deleted."""


class Store:
    """The artifacts below one folder. An artifact is made in `with store.making(...)`; a run reads those of its stages in
    `with store.in_use(...)`, for `--force` in another run replaces artifacts."""

    def __init__(self, root: Path):
        self.root = root

    def folder(self, stage: str, fingerprint: str) -> Path:
        """The folder of an artifact, whether it exists or not."""
        return self.root / f"{stage}-{fingerprint[:16]}"

    def find(self, stage: str, fingerprint: str, entry: str) -> Artifact | None:
        """The published artifact, or None. Its files are not checked: `verify` does that.

        Raises UserError E803 when its manifest is unreadable, was changed, or belongs to another stage.
        """
        folder = self.folder(stage, fingerprint)
        if not folder.is_dir():
            return None
        manifest = _manifest(folder, entry)
        if manifest["fingerprint"] != fingerprint:
            raise _damaged(MANIFEST, "belongs to another stage", folder, entry)
        files = {name: file["sha256"] for name, file in manifest["files"].items()}
        return Artifact(folder, folder.name, manifest["kind"], manifest["stage"], entry, files, manifest["metadata"])

    def verify(self, artifact: Artifact) -> None:
        """Check every file against the manifest, sizes first; links, which no stage writes, do not belong there.

        Raises UserError E803 naming the first that differs.
        """
        folder, entry = artifact.folder, artifact.entry
        sizes = {name: file["size"] for name, file in _manifest(folder, entry)["files"].items()}
        records = (folder / MANIFEST, folder / SEAL)
        present = {str(path.relative_to(folder)): path for path in _files(folder) if path not in records}
        for name in sorted(sizes.keys() | present.keys()):
            if name not in present:
                raise _damaged(name, "is missing", folder, entry)
            if name not in sizes:
                raise _damaged(name, "does not belong there", folder, entry, "Remove it")
            if present[name].is_symlink():
                raise _damaged(name, "is a link, which no stage writes", folder, entry)
            if (size := present[name].stat().st_size) != sizes[name]:
                raise _damaged(name, f"has {size} bytes instead of {sizes[name]}", folder, entry)
        for name, path in sorted(present.items()):
            if sha256_of(path) != artifact.files[name]:
                raise _damaged(name, "has changed", folder, entry)

    @contextlib.contextmanager
    def making(self, stage: str, fingerprint: str, on_wait: Callable[[str], None]) -> Iterator[Path]:
        """An empty work folder for one artifact, locked for this process. Anything left in it at the end is removed.

        While another process makes the same artifact, calls `on_wait` with its pid and waits.
        """
        name = self.folder(stage, fingerprint).name
        with lock(self.root / f".lock-{name}", on_wait):
            work = self.root / f".work-{name}"
            with contextlib.suppress(FileNotFoundError):  # another error is told: another user's killed run may have left it
                shutil.rmtree(work)
            work.mkdir()
            try:
                yield work
            finally:
                shutil.rmtree(work, ignore_errors=True)

    def in_use(self, stage: str, fingerprint: str) -> contextlib.AbstractContextManager[None]:
        """Until its end no other process replaces the artifact, if there is one."""
        return shared_lock(used_lock(self.root, self.folder(stage, fingerprint).name))

    @property
    def cache(self) -> Path:
        """Folder for what stages measure once per machine."""
        return self.root / ".cache"

    def unfinished(self, stage: str, fingerprint: str) -> Path:
        """Folder in which an interrupted stage leaves what it resumes from. Inside `making` no other process uses it."""
        return self.root / f".unfinished-{self.folder(stage, fingerprint).name}"

    def publish(
        self,
        work: Path,
        stage: str,
        fingerprint: str,
        kind: str,
        metadata: dict[str, Any],
        on_wait: Callable[[str], None] | None = None,
    ) -> None:
        """Write the manifest of a work folder and move the folder into the store; files are synced to disk before.

        Where it replaces an artifact that another process uses: raises Locked, or, with `on_wait`, calls that and waits.
        """
        files = {str(path.relative_to(work)): {"sha256": sha256_of(path), "size": path.stat().st_size} for path in _files(work)}
        manifest = {"kind": kind, "stage": stage, "fingerprint": fingerprint, "files": files, "metadata": metadata}
        content = f"{json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=False)}\n".encode()
        (work / MANIFEST).write_bytes(content)
        (work / SEAL).write_bytes(sealed(content))
        for path in [*_files(work), *(path for path in work.rglob("*") if path.is_dir()), work]:
            _sync(path)
        place = self.folder(stage, fingerprint)
        if place.exists():  # rerun with --force
            with lock(used_lock(self.root, place.name), on_wait):
                old = set_aside(place, self.root)
                work.rename(place)
            shutil.rmtree(old, ignore_errors=True)  # on NFS it stays while another program has a file of it open
        else:
            work.rename(place)
        _sync(self.root)
        shutil.rmtree(self.unfinished(stage, fingerprint), ignore_errors=True)

    def sweep(self) -> None:
        """Remove remains of killed processes, and trainings whose last checkpoint is a week old; what a running process uses
        stays, and what cannot be removed: another user's, or on NFS what another program has open."""
        old = [path for path in self.root.glob(".unfinished-*") if _age(path) > KEEP_UNFINISHED]
        for folder in [*self.root.glob(".work-*"), *self.root.glob(f"{ASIDE}*"), *self.root.glob(".lock-*"), *old]:
            name = folder.name.split("-", 1)[1]
            with contextlib.suppress(Locked, FileNotFoundError, PermissionError), lock(self.root / f".lock-{name}"):
                if not folder.name.startswith(".lock-"):
                    shutil.rmtree(folder, ignore_errors=True)
        for used in [*self.root.glob(used_lock(self.root, "*").name), *self.root.glob(served_lock(self.root, "*").name)]:
            with contextlib.suppress(Locked, PermissionError), lock(used):
                pass  # nobody holds it any more: `lock` removes it


def _age(path: Path) -> float:
    """Seconds since the last change of a folder or of anything below it; 0 where another process is just removing it."""
    try:
        return time.time() - max(each.lstat().st_mtime for each in (path, *path.rglob("*")))
    except FileNotFoundError:
        return 0.0


def _manifest(folder: Path, entry: str) -> dict[str, Any]:
    """Read the manifest of an artifact, checked against its seal. Raises UserError E803."""
    try:
        content, seal = (folder / MANIFEST).read_bytes(), (folder / SEAL).read_bytes()
    except FileNotFoundError as error:
        raise _damaged(Path(error.filename).name, "is missing", folder, entry) from None
    except OSError:
        raise _damaged(MANIFEST, "cannot be read", folder, entry) from None
    if seal != sealed(content):
        raise _damaged(MANIFEST, f"has changed, or its seal '{SEAL}' has", folder, entry)
    return json.loads(content)


def _files(folder: Path) -> list[Path]:
    """The files below a folder, and links to folders, whose content `rglob` leaves out."""
    return sorted(path for path in folder.rglob("*") if path.is_file() or path.is_symlink())


def _damaged(name: str, fault: str, folder: Path, entry: str, remedy: str = "Delete this folder") -> UserError:
    """E803. The trials of a sweep have no --force; what was deleted is made again."""
    return UserError("E803", f"artifact file '{name}' {fault}", f"{remedy}, or run again with --force {entry}", str(folder))
