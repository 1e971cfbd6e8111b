"""What a run folder, such as runs/quickstart, leads to: its store, which lies beside it, and the artifact of its last model.

A pipeline writes these files; they are validated as strictly as any untrusted file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from compressor.digests import sha256_of
from compressor.errors import UserError

STORE = ".store"
RUN_FILE, LOCK_FILE, MANIFEST = "run.json", "pipeline.lock.yaml", "artifact.json"
"""The files of a run that tell how its last attempt went and what it made, and that of an artifact."""
RUN_AGAIN = "Run the pipeline again: what is finished is kept"
"""The fix for a damaged file of a run."""
MOST_BYTES, MOST_DEPTH = 2**26, 40
"""Largest size and nesting of a lock file or a manifest."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""Pattern of the name of a run, an artifact or a file in one, so that it cannot lead to another folder."""
SHA256 = re.compile(r"[0-9a-f]{64}")


def is_run(folder: Path) -> bool:
    """Whether this is the folder of a pipeline run."""
    return (folder / LOCK_FILE).is_file()


def store_of(folder: Path, name: str, artifact: str) -> Path:
    """The store with an artifact of the run called `name`, whose `folder` may be given as a link to it, or end in `..`.

    The name is the path below the folder of all runs: a sweep's run has two parts. Where no place has the artifact, it is the
    store beside the folder as it is given.
    """
    above = len(Path(name).parts) - 1
    given, real = folder.absolute(), folder.resolve()
    # a run's folder may itself be a link to another disk: then the store is beside the link
    places = [given.parents[above] / STORE, *([real.parents[above] / STORE] if len(real.parents) > above else [])]
    # Path.is_dir raises where the name is too long
    return next((place for place in places if os.path.isdir(place / artifact)), places[0])


@dataclass(frozen=True)
class LastModel:
    """The artifact of a run's last model: its folder, the names of its files, and the run's lock."""

    folder: Path
    files: frozenset[str]
    lock: Mapping[str, Any]


def last_model(folder: Path, file: str = "") -> LastModel:
    """Find the last model of the run in `folder` through its lock file, and check its files against that; with `file` the last
    one that has this file, if one has.

    Raises UserError E805 (the run has no model, or its artifact is gone), E305 (a damaged lock or artifact), E801.
    """
    lock = _lock(folder / LOCK_FILE)
    row, store = _last_row(lock, folder, file)
    place = store / row["artifact"]
    if not place.is_dir():
        what = f"its artifact {row['artifact']} is gone"
        raise UserError("E805", what, f"Run the pipeline again, or keep {STORE} beside the run's folder", str(store))
    _verify(place, row["files"])
    return LastModel(place, frozenset(row["files"]), lock)


def _last_row(lock: Mapping[str, Any], folder: Path, file: str) -> tuple[dict[str, Any], Path]:
    """The lock's entry of the last model artifact, and the store. Raises UserError E305, E805."""
    name, rows = lock.get("name"), lock.get("stages")
    parts = name.split("/") if isinstance(name, str) else []
    if not parts or not all(NAME.fullmatch(part) for part in parts) or len(parts) > 2 or not isinstance(rows, list):
        raise _damaged(LOCK_FILE, folder)
    models = [row for row in rows if isinstance(row, Mapping) and row.get("kind") == "model"]
    if not models:
        raise UserError("E805", "this run has produced no model", "Run its stages up to tune, or to merge", str(folder))
    having = [row for row in models if isinstance(row.get("files"), Mapping) and file in row["files"]]
    row = (having or models)[-1]
    artifact, files = row.get("artifact"), row.get("files")
    sound = isinstance(artifact, str) and NAME.fullmatch(artifact) and isinstance(files, Mapping) and files
    if not sound or not all(_is_file(name, sha256) for name, sha256 in files.items()):
        raise _damaged(LOCK_FILE, folder)
    return dict(row), store_of(folder, name, artifact)


def _lock(path: Path) -> dict[str, Any]:
    """Read the lock file as plain data. Raises UserError E305."""
    try:
        content = path.read_bytes() if path.stat().st_size <= MOST_BYTES else b""
        lock = plain_yaml(content.decode())
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        lock = None
    if not isinstance(lock, dict):
        raise _damaged(path.name, path.parent)
    return lock


def plain_yaml(text: str) -> Any:
    """Parse YAML as written by a run. Raises ValueError for aliases, which multiply, and for depth: libyaml's fast parser
    ends the process over a million brackets. Raises YAMLError."""
    loader, depth = getattr(yaml, "CSafeLoader", yaml.SafeLoader), 0
    for event in yaml.parse(text, Loader=loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_DEPTH or isinstance(event, yaml.AliasEvent):
            raise ValueError
    return yaml.load(text, Loader=loader)


def _is_file(name: object, sha256: object) -> bool:
    """Whether `name` is a path below an artifact's folder, and `sha256` a checksum."""
    parts = name.split("/") if isinstance(name, str) else [""]
    return all(NAME.fullmatch(part) for part in parts) and isinstance(sha256, str) and SHA256.fullmatch(sha256) is not None


def _verify(place: Path, files: Mapping[str, str]) -> None:
    """Check that the artifact is the one that the run made: lock, manifest and file contents must agree.

    Raises UserError E305 and E801.
    """
    manifest = place / MANIFEST
    try:
        listed = json.loads(manifest.read_bytes())["files"] if manifest.stat().st_size <= MOST_BYTES else {}
        recorded = {name: file["sha256"] for name, file in listed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _damaged(MANIFEST, place) from None
    if recorded != files:
        raise UserError("E305", f"{MANIFEST} does not match the run's lock file", "Run the pipeline again", str(place))
    for name in sorted(_changed(place, files)):
        raise UserError("E305", f"{name} has changed since the run", "Run the pipeline again", str(place))


def _changed(place: Path, files: Mapping[str, str]) -> Iterator[str]:
    """Raises UserError E801 for a file that this account may not read."""
    for name, sha256 in files.items():
        try:
            same = not (place / name).is_symlink() and sha256_of(place / name) == sha256
        except PermissionError:
            raise UserError("E801", "this account may not read it", "Change its permissions", str(place / name)) from None
        except OSError:
            same = False
        if not same:
            yield name


def _damaged(name: str, folder: Path) -> UserError:
    return UserError("E305", f"{name} cannot be read", RUN_AGAIN, str(folder))
