"""A model repository outside the store, in a local folder or any storage that fsspec opens (s3://): its models' versions.

NAME/{config.pbtxt, labels.txt, warmup/, VERSION/...}. A version folder also has BESIDE, what stood beside the versions when it
was published, and RECORD, so that an earlier version comes back exactly as it was.
"""

from __future__ import annotations

import contextlib
import fcntl
import filecmp
import glob
import json
import os
import re
import secrets
import shutil
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from compressor.errors import CompressError, UserError
from compressor.locking import open_lock, take_lock
from serving.repository_safety import named_files

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

CONFIG, LOCK = "config.pbtxt", ".deploy.lock"
BESIDE, RECORD = "published", "published.json"
STAGED, NEW = ".staged-", ".deploying"
"""Beginning and end of names of what is about to take its place, or was moved from it. Triton takes every folder in the
repository for a model, also a hidden one, and does not start with it; files there, and hidden folders in a model's, it ignores.
"""
ASIDE = ".aside-"
"""Beginning of the name of a version's folder while it is rolled back."""
STORAGES = frozenset({"aiobotocore", "aiohttp", "azure", "botocore", "gcsfs", "google", "s3fs"})
"""Packages whose exceptions are a storage's, and that raise others for it."""


@dataclass(frozen=True)
class Target:
    """The repository at `root` of a file system."""

    files: AbstractFileSystem
    root: str

    @classmethod
    def at(cls, location: str, *, create: bool = True) -> Target:
        """From a folder or a URL, which is created if it is missing and `create`.

        Raises UserError E757 (its package or the folder is missing, or it cannot be reached; or a URL has `::`, which fsspec
        takes for a chain of storages, and for another place).
        """
        import fsspec
        from fsspec.implementations.local import LocalFileSystem

        if not location.strip():  # fsspec takes it for the current folder
            raise UserError("E757", "no repository is named", "Give its folder or URL")
        is_url = "://" in location
        if is_url and "::" in location:
            raise UserError("E757", "'::' in the URL of a repository", "Give its own URL, in a place without '::'", location)
        try:
            files, root = fsspec.core.url_to_fs(location) if is_url else (LocalFileSystem(), str(Path(location).absolute()))
            if create:
                files.makedirs(root, exist_ok=True)
            elif not files.isdir(root):
                raise FileNotFoundError("there is no such folder")
        except ImportError as error:
            what = f"{location.partition(':')[0]}:// needs a package ({error})"
            raise UserError("E757", what, "Run: pip install 'compress-pipeline[s3]'", location) from error
        except Exception as error:  # every storage raises its own
            what = f"the repository cannot be opened ({type(error).__name__}: {error})"
            raise UserError("E757", what, "Check the location and your credentials", location) from error
        return cls(files, root.rstrip("/"))

    @contextlib.contextmanager
    def storage_errors(self) -> Iterator[None]:
        """Context of work in the repository. Raises UserError E757 for what a storage raises that is not a local folder: it
        refuses a write, or is gone."""
        try:
            yield
        except Exception as error:
            if self.local or not _of_storage(error) or isinstance(error, CompressError):
                raise
            what = f"the repository cannot be read or written ({type(error).__name__}: {error})"
            raise UserError("E757", what, "Check the connection and what your credentials allow", self.root) from error

    @property
    def local(self) -> bool:
        protocol = self.files.protocol
        return "file" in ((protocol,) if isinstance(protocol, str) else protocol)

    def path(self, *parts: str | int) -> str:
        return "/".join((self.root, *map(str, parts)))

    def models(self) -> list[str]:
        """Names of the models, sorted; also of one whose first version is there, and its config not yet."""
        root = glob.escape(self.root)
        named = {path.rsplit("/", 2)[-2] for path in self.files.glob(f"{root}/*/{CONFIG}")}
        return sorted(named | {path.rsplit("/", 3)[-3] for path in self.files.glob(f"{root}/*/*/{RECORD}")})

    def versions(self, model: str) -> list[int]:
        """The versions of a model, ascending."""
        return sorted(int(name) for name in self._names(model) if name.isdecimal() and name[0] != "0")

    def versions_aside(self, model: str) -> list[int]:
        """The versions that `set_aside` has moved: left there, their rollback was killed, or undone."""
        names = (name.removeprefix(ASIDE) for name in self._names(model) if name.startswith(ASIDE))
        return sorted(int(name) for name in names if name.isdecimal())

    def _names(self, model: str) -> list[str]:
        """The names of what is in a model's folder."""
        if not self.files.isdir(self.path(model)):
            return []
        self.files.invalidate_cache()
        return [entry["name"].rstrip("/").rsplit("/", 1)[-1] for entry in self.files.ls(self.path(model), detail=True)]

    def record(self, model: str, version: int | str) -> dict[str, Any]:
        """RECORD of a version; {} where it was not published by this program. Raises UserError E757 if it is damaged."""
        path = self.path(model, version, RECORD)
        if not self.files.exists(path):
            return {}
        try:
            record = json.loads(self.files.cat_file(path))
        except ValueError as error:
            raise _damaged(str(error), path) from error
        if not isinstance(record, dict):
            raise _damaged("not an object", path)
        return record

    def finished(self, model: str, version: int) -> bool:
        """Whether the deployment of a version has ended, as far as its record tells."""
        return bool(self.record(model, version).get("finished", True))

    def returned(self, model: str, version: int) -> bool:
        """Whether a version that `versions_aside` names is whole in its place again, its rollback undone. Where half of it is
        there, its record says unfinished, or is missing."""
        return bool(self.record(model, version).get("finished", False))

    def leaves(self, model: str, version: int) -> bool:
        """Whether a rollback has yet to move a version aside: `finished` is null in its record."""
        return self.record(model, version).get("finished", True) is None

    def mark(self, model: str, version: int, **facts: bool | None) -> None:
        """Change the record of a version."""
        record = self.record(model, version) | facts
        self._replace(self.path(model, version, RECORD), json.dumps(record, indent=1).encode())

    def holds(self, model: str, version: int, source: Path) -> bool:
        """Whether a version has the files of the version folder `source`: their contents, in an object store their sizes."""
        files, place = version_files(source), self.path(model, version)
        if self.local:
            there = {name: Path(place, name) for name in files}
            return all(path.is_file() and filecmp.cmp(path, files[name], shallow=False) for name, path in there.items())
        self.files.invalidate_cache()
        found = {path.partition(f"{place}/")[2]: facts["size"] for path, facts in self.files.find(place, detail=True).items()}
        return all(found.get(name) == path.stat().st_size for name, path in files.items())

    def require_kept(self, model: str, version: int) -> None:
        """Raises UserError E757 where a version cannot come back as it was. Where this program published neither it nor the
        newest one, nothing is kept of either, and what stands beside them stays."""
        newest = self.record(model, self.versions(model)[-1])  # a rollback may have marked another program's
        if "sha256" not in newest and not self.files.exists(self.path(model, version, BESIDE)):
            return
        if lacking := self._lacking(model, version):
            file = f"{BESIDE}/{lacking}"
            what = f"version {version} of '{model}' cannot come back as it was: {file} is missing, or cannot be read"
            fix = "Put the file back; or delete that version's folder, and deploy the run that you want"
            raise UserError("E757", what, fix, self.path(model, version))

    def _lacking(self, model: str, version: int) -> str:
        """What BESIDE of a version lacks of its config and the files that this names; '' where it is whole. A config of another
        program may be of a Triton that is not known here: its bytes alone count."""
        try:
            content = self.files.cat_file(self.path(model, version, BESIDE, CONFIG))
        except FileNotFoundError:
            return CONFIG
        if "sha256" not in self.record(model, version):
            return ""
        try:
            config = text_format.Parse(content, ModelConfig())
        except (UnicodeDecodeError, text_format.ParseError):
            return CONFIG
        missing = (name for name in named_files(config) if not self.files.exists(self.path(model, version, BESIDE, name)))
        return next(missing, "" if content else CONFIG)

    def restore(self, model: str, version: int) -> None:
        """Put back what stood beside the versions when this one was published. Raises UserError E757 where that is not whole,
        and changes nothing then: files of the one would stand beside those of another."""
        self.require_kept(model, version)
        found = self.files.find(self.path(model, version, BESIDE))
        names = {path: path.rpartition(f"/{model}/{version}/{BESIDE}/")[2] for path in found}
        self.set_beside(model, {name: self.files.cat_file(path) for path, name in names.items()})

    def keep_beside(self, model: str, version: int) -> None:
        """Keep in BESIDE of the newest version what stands beside it, where that is not kept whole: another program, which
        keeps nothing, has published it, or a file was lost."""
        if not self._lacking(model, version):
            return
        home = f"{self.path(model)}/"
        names = (path.partition(home)[2] for path in self.files.find(home))
        # the config last, and at once: with it, all is kept
        for name in sorted(filter(is_beside, names), key=CONFIG.__eq__):
            self._replace(self.path(model, version, BESIDE, name), self.files.cat_file(home + name))

    def require_return(self, model: str, version: int) -> None:
        """Raises UserError E757 where the newest version could not come back once another is published, for what stands beside
        it, which `keep_beside` has kept, is not whole."""
        if lacking := self._lacking(model, version):
            what = f"version {version} of '{model}' could not come back if the new one failed: no {lacking} that can be read"
            fix = "Put that file into the model's folder; or move that version's folder away"
            raise UserError("E757", what, fix, self.path(model))

    def put(self, source: Path, model: str, version: int, beside: dict[str, bytes], record: dict[str, Any]) -> None:
        """Copy the version folder `source` to `version` of `model`, whole or not at all where the storage can rename.

        `beside` are the model's config and the files that it names (path -> content), kept in BESIDE. What was kept so in
        `source`, which may have been published itself, is left out."""
        # the record first: a version whose upload was killed is known by it
        contents: dict[str, bytes | Path] = {RECORD: json.dumps(record, indent=1).encode()}
        contents |= {f"{BESIDE}/{name}": content for name, content in beside.items()}
        contents |= version_files(source)
        place = self.path(model, version)
        if self.local:
            self._put_at_once(contents, model, place)
            return
        try:
            for name, content in contents.items():
                self._write(f"{place}/{name}", content)
        except BaseException:
            self.remove(place)
            raise

    def _put_at_once(self, contents: dict[str, bytes | Path], model: str, place: str) -> None:
        """Copy to files of the repository, then move them into the model's folder: a server that polls would load a model
        whose folder changes again with each poll, and fail to load a new one that has no version yet."""
        folder = self._staged(model)
        copies = {name: self.path(f"{Path(folder).name}.{number}") for number, name in enumerate(contents)}
        try:
            for name, copy in copies.items():
                self._write(copy, contents[name])
            for name, copy in copies.items():
                Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
                shutil.move(copy, f"{folder}/{name}")  # a model's folder may be a link to another file system
            Path(folder).rename(place)
        except BaseException:
            for path in (*copies.values(), folder):
                self.remove(path)
            _remove_empty(Path(self.path(model)))
            raise

    def _staged(self, model: str) -> str:
        """Another hidden folder in that of a model."""
        return self.path(model, f"{STAGED}{secrets.token_hex(4)}")

    def set_aside(self, model: str, version: int) -> None:
        """Move a version to a hidden folder, from which `bring_back` brings it in again, also where a storage ends this half
        way."""
        place, aside = self.path(model, version), self.path(model, f"{ASIDE}{version}")
        if self.local and not self.files.exists(aside):
            Path(place).rename(aside)
        else:
            self._copy_missing(place, aside)
            self.remove(place)

    def bring_back(self, model: str, version: int) -> None:
        """Make a version whole in its place again; what a storage that cannot rename has aside stays until `remove_aside`."""
        place, aside = self.path(model, version), self.path(model, f"{ASIDE}{version}")
        if not self.local:
            self._copy_missing(aside, place)
        elif self.files.exists(aside):
            Path(aside).rename(place)

    def remove_version(self, model: str, version: int) -> None:
        """Remove a version's folder; where the storage can rename, what a kill leaves of it is no version."""
        place = self.path(model, version)
        if self.local:
            staged = self._staged(model)
            Path(place).rename(staged)
            place = staged
        self.remove(place)

    def remove_aside(self, model: str, version: int, *file: str) -> None:
        """Remove a version that was moved aside, or a file of it, for good."""
        self.remove(self.path(model, f"{ASIDE}{version}", *file))

    def _copy_missing(self, place: str, other: str) -> None:
        """Copy the files of a folder that another lacks, one by one: in an object store a folder is nothing that could be
        copied, and fsspec's `mv` fails at one."""
        self.files.invalidate_cache()
        names, there = ({path.partition(f"{folder}/")[2] for path in self.files.find(folder)} for folder in (place, other))
        missing = sorted(names - there)
        self.files.copy([f"{place}/{name}" for name in missing], [f"{other}/{name}" for name in missing])

    def _write(self, path: str, content: bytes | Path) -> None:
        """Write a file: the content, or that of a file here."""
        self.files.makedirs(path.rpartition("/")[0], exist_ok=True)
        if isinstance(content, Path):
            self.files.put_file(str(content), path)
        else:
            self.files.pipe_file(path, content)

    def set_beside(self, model: str, contents: dict[str, bytes]) -> None:
        """Replace a model's config and the files that it names (path -> content), each at once, the config last."""
        for name in sorted(contents, key=CONFIG.__eq__):
            self._replace(self.path(model, name), contents[name])

    def _replace(self, path: str, content: bytes) -> None:
        if not self.local:  # one object is replaced at once
            self._write(path, content)
            return
        # one deployment at a time: what a killed one left under this name is overwritten, or removed by the next
        folder, _, name = path.rpartition("/")
        temporary = Path(folder, f".{name}{NEW}")
        try:
            self._write(str(temporary), content)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.files.rm(path, recursive=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Context of one deployment at a time, on one machine. Raises UserError E756 while another is at work, E801 where the
        file system has no locks."""
        if not self.local:
            yield
            return
        path = Path(self.path(LOCK))
        with os.fdopen(open_lock(path)) as lock:
            try:
                take_lock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB, path)
            except BlockingIOError as error:
                raise UserError("E756", "another deployment is at work here", "Wait until it has ended", self.root) from error
            self._clear()
            yield

    def _clear(self) -> None:
        """Remove what killed deployments left half written; nobody else is at work."""
        root = Path(self.root)
        for path in (*root.glob(f"{STAGED}*"), *root.glob(f"*/{STAGED}*")):
            with contextlib.suppress(OSError):
                self.remove(str(path))
                _remove_empty(path.parent)
        for path in root.rglob(f".*{NEW}"):
            path.unlink(missing_ok=True)


def _of_storage(error: Exception) -> bool:
    """Whether an error is a storage's own. Many are OSErrors with a number, as those of this machine's disk are, which say
    what file they are about."""
    if isinstance(error, OSError) and error.errno is None:
        return True
    frames = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    raised = any(name.partition(".")[0] in STORAGES for name in frames) and getattr(error, "filename", None) is None
    return raised or type(error).__module__.partition(".")[0] in STORAGES


def is_beside(name: str) -> bool:
    """Whether the file at this path in a model's folder stands beside the versions, and is not hidden."""
    return not re.match(r"[0-9]+/|\.", name)


def version_files(version: Path) -> dict[str, Path]:
    """The files of a version folder by their paths in it, without those that publishing it added: BESIDE and RECORD."""
    files = {path.relative_to(version).as_posix(): path for path in sorted(version.rglob("*")) if path.is_file()}
    return {name: path for name, path in files.items() if name != RECORD and not name.startswith(f"{BESIDE}/")}


def _remove_empty(folder: Path) -> None:
    """Remove a folder in which nothing is left: Triton would take it for a model."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def _damaged(reason: str, path: str) -> UserError:
    fix = "Delete the version's folder; or this file alone, if the version may stay as one that another program published"
    return UserError("E757", f"the record of a version is damaged ({reason})", fix, path)


def new_record(run: str, sha256: str) -> dict[str, Any]:
    """RECORD of a version that is published now: `finished` when all models of the run are."""
    published = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"run": run, "sha256": sha256, "published": published, "proven": False, "finished": False}
