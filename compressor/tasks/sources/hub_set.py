"""Data sets of the Hugging Face hub by name: `hub:OWNER/NAME[:CONFIG]/SPLIT[:ROWS]` -> rows in a local .jsonl file.

The rows are streamed once into a cache. From there on they are an ordinary file: checked with its line numbers, and known to
fingerprints by its content, not by the name of the data set.
"""

from __future__ import annotations

import errno
import filecmp
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compressor.digests import Mark, mark_of, settled
from compressor.errors import UserError
from compressor.tasks.sources import needed
from compressor.tasks.sources.content import DATA, WHERE_PATHS_BEGIN
from compressor.tasks.sources.hub_card import README, found_outside, named_outside
from compressor.tasks.sources.hub_rows import rows_as_written
from compressor.tasks.sources.parquet_rows import shortest, text_of
from compressor.text_files import from_home, in_units, written_as_path

HUB = "hub:"
FORM = "hub:OWNER/NAME/SPLIT, with :CONFIG after NAME and :ROWS after SPLIT where needed"
PATTERN = re.compile(
    r"hub:(?P<place>[^:\0]+?)(:(?P<config>[^:/\0]{1,100}))?/(?P<split>[A-Za-z0-9_.-]{1,100})(:(?P<rows>[1-9][0-9]{0,8}))?"
)
REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk, a full quota and `ulimit -f`."""
READING = 3
"""Number of the way in which rows are read, raised where it changes: what the cache has from an earlier way is read again."""
_READ: dict[Path, tuple[dict[Path, Mark], Mark | None]] = {}
"""The splits of local folders that this process has read: file in the cache -> marks of the folder's files, and its own."""
Say = Callable[[int], None]
"""Told the number of rows that were read so far."""


@dataclass(frozen=True)
class HubSplit:
    """One split of a data set. `place` is OWNER/NAME, or the path of a `local` folder laid out like one of the hub's."""

    reference: str
    place: str
    config: str | None
    split: str
    rows: int | None
    local: bool

    @property
    def path(self) -> Path:
        """The file in the cache: of this data set, config, split and number of rows."""
        # absolute: a relative one is of the current folder, and paths of a task are of the pipeline's
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "compress", "data", str(READING)).absolute()
        marked = f"-{hashlib.sha256(os.fsencode(self.place)).hexdigest()[:8]}" if self.local else ""
        name = f"{Path(self.place).name}{marked}" if self.local else self.place.replace("/", "--")
        ending = "" if self.rows is None else f"-first-{self.rows}"
        return base / name / (self.config or "default") / f"{self.split}{ending}.jsonl"


def is_hub(value: object) -> bool:
    """Whether a value of a pipeline file is a reference to a data set of the hub."""
    return isinstance(value, str) and value.startswith(HUB)


def parse(reference: str, folder: Path) -> HubSplit:
    """Parse a reference; a path in it is relative to `folder`. Raises UserError E230."""
    match = PATTERN.fullmatch(reference)
    place = match["place"] if match else ""
    local = written_as_path(place)
    if match is None or not (local or REPOSITORY.fullmatch(place)):
        what = f"'{reference:.100}' is not a split of a data set"
        raise UserError("E230", what, f"Write {FORM}, e.g. hub:nyu-mll/glue:sst2/train:10000")
    if local:
        place = str((folder / from_home(place)).resolve())
    return HubSplit(reference, place, match["config"], match["split"], int(match["rows"]) if match["rows"] else None, local)


def fetch(wanted: HubSplit, say: Say = lambda rows: None) -> Path:
    """The file with the rows of a split, read from the hub unless the cache has it; a local folder is read again, but once in
    this process for as long as its files are unchanged. A file of equal rows stays in place: a run may be reading it.

    Nothing is left in the cache unless every row arrived. Raises UserError E907 (datasets is missing), E231 (out of reach),
    E232 (no such config or split, a file that is none of its own, or files that cannot be read as rows), E215 (too large), E804
    (the disk is full), E801.
    """
    if not wanted.local and _is_whole(wanted.path):
        return wanted.path
    if wanted.local and not os.path.isdir(wanted.place):
        raise UserError("E231", f"no folder {wanted.place}", WHERE_PATHS_BEGIN, wanted.reference)
    marks, now = _marks(wanted), time.time_ns()
    if wanted.local and _READ.get(wanted.path) == (marks, mark_of(wanted.path)):
        return wanted.path
    try:
        datasets = needed("datasets", "a data set of the hub", wanted.reference)
    except UserError as error:
        raise UserError(error.code, error.what, error.fix + _or_earlier(wanted), error.where) from None
    with _reachable(datasets, wanted):
        if wanted.local and os.path.isfile(os.path.join(wanted.place, "state.json")):
            raise ValueError("a folder that `save_to_disk` wrote; `push_to_hub` or `to_parquet` write one that is read")
        if not wanted.local:
            _ask_once(wanted.place)
        _require_own(named_outside(wanted.place, wanted.local), wanted)
        # by its name alone, `datasets` would take a folder OWNER/NAME below the current one
        address = wanted.place if wanted.local else f"hf://datasets/{wanted.place}"
        builder = datasets.load_dataset_builder(address, wanted.config)
        _require_own(found_outside(builder, wanted.place, wanted.local), wanted)
        rows, features = rows_as_written(builder, wanted.split)
    _write(_plain_rows(rows, features, datasets, wanted), wanted, say)
    if wanted.local and _marks(wanted) == marks and settled(marks.values(), now):
        _READ[wanted.path] = marks, mark_of(wanted.path)
    return wanted.path


def _ask_once(place: str) -> None:
    """Raise what the hub's client raises where it cannot reach the hub. Later it asks again and again, for more than a minute,
    with two lines on the terminal each time."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    with suppress(HfHubHTTPError, OfflineModeIsEnabled):  # the hub's answers, and its cache, are for `datasets` to tell
        get_hf_file_metadata(hf_hub_url(place, README, repo_type="dataset"))


def _require_own(outside: str | None, wanted: HubSplit) -> None:
    """Raise UserError E232 for a file that is none of the data set's own."""
    if outside is not None:
        what = f"the data set names '{outside:.200}' by an address, or a path or link that leads out of it"
        raise UserError("E232", what, "If you trust it, fetch that file yourself, and name it as the data", wanted.reference)


def _is_whole(path: Path) -> bool:
    """Whether the file in the cache is there, and ends as a row does. What a loss of power leaves is empty, or does not."""
    if not path.is_file() or not (size := path.stat().st_size):
        return False
    try:
        with path.open("rb") as file:
            file.seek(size - 1)
            return file.read() in (b"}", b"\n")
    except PermissionError:  # who reads it tells
        return True


def _marks(wanted: HubSplit) -> dict[Path, Mark]:
    """The marks of the files in a local folder."""
    files = sorted(Path(wanted.place).rglob("*")) if wanted.local else ()
    return {path: mark for path in files if path.is_file() and (mark := mark_of(path))}


def _plain_rows(rows: Any, features: Any, datasets: Any, wanted: HubSplit) -> Iterator[dict[str, Any]]:
    """Up to `rows` rows. A class is its number, so that class 1 stays the positive one; -1, which marks a hidden label, is
    missing. A number in single precision, as STS-B's scores, is the one that was meant."""
    classes = [name for name in features if type(features[name]).__name__ == "ClassLabel"]
    kinds = {"float16": np.float16, "float32": np.float32}
    single = {name: kinds[kind] for name in features if (kind := getattr(features[name], "dtype", None)) in kinds}
    with _reachable(datasets, wanted):
        for number, row in enumerate(rows):
            if number == wanted.rows:
                return
            # a column of arrays has the same dtype
            numbers = {name: shortest(row[name], kind) for name, kind in single.items() if isinstance(row.get(name), float)}
            yield row | numbers | {name: None for name in classes if row.get(name) == -1}


def _write(rows: Iterator[dict[str, Any]], wanted: HubSplit, say: Say) -> None:
    """Write rows beside the file in the cache, which then takes its place."""
    scratch, size = None, 0
    try:
        wanted.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("wb", dir=wanted.path.parent, suffix=".part", delete=False) as file:
            scratch = file.name
            for number, row in enumerate(rows, start=1):
                size += file.write(_line(row))
                say(number)
                if size > DATA.most:
                    what = f"more than {in_units(DATA.most)} after {number:,} rows"
                    name = wanted.reference.removesuffix(f":{wanted.rows}")
                    raise UserError("E215", what, f"Take fewer: {name}:{max(number // 2, 1)}")
            file.flush()
            os.fsync(file.fileno())  # the name alone tells that the rows are there
        if not (wanted.path.is_file() and filecmp.cmp(scratch, wanted.path, shallow=False)):
            os.replace(scratch, wanted.path)
            scratch = None
    except OSError as error:
        code = "E804" if error.errno in FULL else "E801"
        fix = f"{'Make room' if code == 'E804' else 'Change its permissions'}, or set XDG_CACHE_HOME to another folder"
        raise UserError(code, f"cannot be written ({error.strerror})", fix, str(wanted.path.parent)) from None
    finally:
        if scratch is not None:
            os.unlink(scratch)


def _line(row: dict[str, Any]) -> bytes:
    """A row as a line of UTF-8. Half of a character, which UTF-8 does not have, stays an escape: reading the rows tells
    where."""
    try:
        return json.dumps(row, ensure_ascii=False, default=_plain).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(row, default=_plain).encode() + b"\n"


def _plain(value: Any) -> str | None:
    """A value that JSON does not have, as text; bytes that are no text are missing."""
    return text_of(value) if isinstance(value, bytes) else str(value)


@contextmanager
def _reachable(datasets: Any, wanted: HubSplit) -> Iterator[None]:
    """Context in which the errors of `datasets` are E231 where the data set is out of reach, and E232 where it is not as
    named."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the library raises a dozen unrelated types
        reason = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
        if isinstance(error, ValueError | datasets.exceptions.DatasetGenerationError | KeyError) or wanted.local:
            what = f"the data set is there, and this split of it cannot be read ({reason})"
            raise UserError("E232", what, "Check CONFIG and SPLIT against the names above", wanted.reference) from None
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
        fix = "Check the name and the network, or copy the data set's files and name their folder: hub:./FOLDER/SPLIT"
        fix += "" if offline else "; with HF_HUB_OFFLINE=1 it is read from the cache of datasets, if that has it"
        what = f"could not be fetched from the hub{offline}: {reason}"
        raise UserError("E231", what, fix + _or_earlier(wanted), wanted.reference) from None


def _or_earlier(wanted: HubSplit) -> str:
    """The end of a fix, where the cache has the rows as they were read in an earlier way, the latest that there is."""
    way = wanted.path.parents[2]
    ways = [way.with_name(str(number)) for number in range(READING - 1, 1, -1)] + [way.parent]  # the first had no number
    found = [path for earlier in ways if (path := earlier / wanted.path.relative_to(way)).is_file()]
    return f"; or name this file itself, the rows as an earlier version read them: {found[0]}" if found else ""
