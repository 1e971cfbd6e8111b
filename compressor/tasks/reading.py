"""Data files -> rows: CSV, TSV (no quoting), JSON lines and columns of words, each also gzipped; checked once, here, with
the line of each fault."""

from __future__ import annotations

import csv
import difflib
import io
import json
import os
import random
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from compressor.errors import UserError, UserErrors
from compressor.tasks import PACKED, Subset, TaskConfig, ending
from compressor.tasks.decoding.prompt_items import check_references
from compressor.tasks.listing import listed
from compressor.tasks.rows import Split
from compressor.tasks.task_kind import TaskKind, kind_of
from compressor.text_files import FileKind, decode, read_bytes, too_large

Rows = list[tuple[int, dict[str, object]]]
WORD_FILES = (".conll", ".txt")
"""Endings of files with a word a line; the line number of a row is that of its first word."""


MOST_LEVELS = 50
"""Deepest nesting of a JSON row; the existing kinds of tasks need two levels."""
DATA = FileKind(
    noun="data file",
    most=512 * 1024**2,
    missing=("E201", "Paths are relative to the pipeline file"),
    folder=("E202", "Name a .csv, .tsv, .jsonl or .conll file"),
    size=("E215", "Take a part of its rows: all are held in memory"),
    encoding="E203",
)


@dataclass(frozen=True)
class TaskData:
    """Both splits, and the label names in the order of the model's outputs."""

    train: Split
    validation: Split
    label_names: list[str]


def check_data(task: TaskConfig) -> None:
    """Read both files and raise UserErrors (E2xx) with all faults in them."""
    read_task(task)


def read_task(task: TaskConfig) -> TaskData:
    """Read and check both files. Raises UserErrors with E2xx faults of both files, one line each."""
    faults: list[UserError] = []
    splits = []
    for path in (task.train, task.validation):
        try:
            splits.append(_checked_columns(path, task))
        except UserError as error:
            faults.append(error)
    if faults:
        raise UserErrors(faults)
    kind = kind_of(task.kind)
    names = kind.outputs(task, [label for _, _, label in splits[0]])
    train, validation = (
        Split(
            [text for _, text, _ in rows],
            kind.targets(path, [(line, label) for line, _, label in rows], names),
            [line for line, _, _ in rows],
        )
        for path, rows in zip((task.train, task.validation), splits, strict=True)
    )
    if task.decode:
        check_references(validation, task.decode, task.validation)
    return TaskData(train if task.subset is None else _drawn(train, task.subset, names, task.train, kind), validation, names)


def _drawn(train: Split, subset: Subset, names: list[str], path: Path, kind: TaskKind) -> Split:
    """The rows that `subset` samples. Raises UserError E211 when they lack what training needs."""
    # the share as written: 0.29 of 100 rows is 29, although 0.29 * 100 is slightly less in floating point
    count = int(Fraction(str(subset.share)) * len(train))
    rows = sorted(random.Random(subset.seed).sample(range(len(train)), count))
    labels = [train.labels[row] for row in rows]
    if missing := kind.lacks(labels, names):
        what = f"the subset of {count} of {len(train)} rows (seed {subset.seed}) holds {missing}"
        raise UserError("E211", what, "Raise subset.share, take another subset.seed, or add such rows", str(path))
    return Split([train.texts[row] for row in rows], labels, [train.lines[row] for row in rows])


def _checked_columns(path: Path, task: TaskConfig) -> list[tuple[int, tuple[Any, ...], Any]]:
    """(line, texts, label) of every row of one file."""
    rows, kind = read_rows(path), kind_of(task.kind)
    require_columns(rows, (*task.text_columns, task.label), path)
    if kind.generates:
        rows = [(line, single) for line, row in rows for single in _with_each(row, task.label)]
    checked = [(line, *kind.example(row, task, path, line)) for line, row in rows]
    if not kind.generates:
        require_sentences([texts for _, texts, _ in checked], task, path)
    return checked


def _with_each(row: dict[str, object], label: str) -> list[dict[str, object]]:
    """A row whose target is a list, as one row for each of its texts; any other row as it is."""
    targets = row[label]
    return [type(row)({**row, label: target}) for target in targets] if isinstance(targets, list) and targets else [row]


def require_columns(rows: Rows, names: Iterable[str], path: Path) -> None:
    """Raises UserError E204 where there is no row, E205 where the first one lacks a column."""
    if not rows:
        raise UserError("E204", "the file has no rows", "Give at least one row", str(path))
    columns = list(rows[0][1])
    for name in names:
        if name not in columns:
            raise UserError("E205", f"no column '{name}'", _nearest_column(name, columns), f"{path}:1")


def require_sentences(texts: Sequence[tuple[Any, ...]], task: TaskConfig, path: Path) -> None:
    """Raises UserError E206 for a text column that holds only numbers."""
    for position, name in enumerate(task.text_columns):
        if all(_is_number(row[position]) for row in texts):
            raise UserError(
                "E206", f"column '{name}' holds only numbers", "Name the column that holds the sentences", f"{path}:1"
            )


def _nearest_column(name: str, columns: list[str]) -> str:
    near = difflib.get_close_matches(name, columns, n=1)
    return f"Did you mean '{near[0]}'?" if near else f"The file has: {listed(columns)}"


def _is_number(text: Any) -> bool:
    try:
        float(text)
    except (ValueError, TypeError):  # not a tuple of words
        return False
    return True


def read_rows(path: Path) -> Rows:
    """Read every row with the number of its first line. Raises UserError E201, E202, E203, E210, E215, E216."""
    readers = {".tsv": _read_tsv, ".csv": _read_csv, ".jsonl": _read_jsonl, **dict.fromkeys(WORD_FILES, _read_words)}
    if ending(path) not in readers and os.path.isfile(path):  # a folder or a pipe is reported as such, whatever its suffix
        fix = f"Use {', '.join(readers)}, optionally compressed ({PACKED})"
        raise UserError("E202", f"unknown file extension '{ending(path) or path.suffix}'", fix, str(path))
    text = data_text(path)
    return list(readers[ending(path)](text, path))


def data_text(path: Path) -> str:
    """The text of a data file, decompressed if it is gzipped. Raises UserError E201, E202, E203, E215."""
    content = read_bytes(path, DATA)
    return decode(_unpacked(content, path) if path.suffix == PACKED else content, DATA.encoding, str(path))


def _unpacked(content: bytes, path: Path) -> bytes:
    """Decompress gzip data and check its checksums. Raises UserError E201 for damaged data, E215 if it is too large."""
    unpacked = b""
    while content:  # a gzip file may consist of several members
        reader = zlib.decompressobj(wbits=31)
        try:
            unpacked += reader.decompress(content, DATA.most + 1 - len(unpacked))
        except zlib.error as error:
            raise UserError("E201", f"cannot be decompressed ({error})", "Copy the file again", str(path)) from None
        if len(unpacked) > DATA.most:
            raise too_large(len(unpacked), DATA, str(path))
        if not reader.eof:
            raise UserError("E201", "cannot be decompressed (cut short)", "Copy the file again", str(path))
        content = reader.unused_data
    return unpacked


def _read_tsv(text: str, path: Path) -> Iterator[tuple[int, dict]]:
    """Read TSV in GLUE's dialect: tabs, no quoting, one row per line."""
    lines = text.replace("\r\n", "\n").split("\n")
    header = _header(lines[0].split("\t"), path)
    for number, line in enumerate(lines[1:], start=2):
        if line:
            yield number, _as_row(header, line.split("\t"), f"{path}:{number}")


def _read_csv(text: str, path: Path) -> Iterator[tuple[int, dict]]:
    # newline="": lines end as csv ends them; splitlines() would also break rows at U+2028 and the like.
    # strict=True makes a quote that never closes an error instead of one giant field
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # a process-wide limit, 131,072 by default
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    line = 1
    try:
        header = _header(next(reader, []), path)
        line = reader.line_num + 1
        for fields in reader:
            if fields:
                yield line, _as_row(header, fields, f"{path}:{line}")
            line = reader.line_num + 1
    except csv.Error as error:
        raise UserError("E210", f"not CSV ({error})", "Check the quotes", f"{path}:{line}") from None


def _header(names: list[str], path: Path) -> list[str]:
    """The column names. Raises UserError E216 for a name that occurs twice, because it is ambiguous."""
    if repeated := _repeated(filter(None, names)):
        what = f"column '{repeated:.60}' appears twice in the header"
        raise UserError("E216", what, "Rename or drop one of them", f"{path}:1")
    return names


def _repeated(names: Iterable[str]) -> str | None:
    """The first name that occurs a second time."""
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)


def _read_jsonl(text: str, path: Path) -> Iterator[tuple[int, dict]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = DECODER.decode(line)
        except _Repeated as key:
            what = f"key '{key!s:.60}' appears twice in one object"
            raise UserError("E216", what, "Keep one of them", f"{path}:{number}") from None
        except json.JSONDecodeError as error:
            raise UserError("E210", f"not JSON ({error.msg})", "Write one JSON object a line", f"{path}:{number}") from None
        except ValueError:
            what = "an integer of more digits than Python reads"
            raise UserError("E210", what, "Write it as text, or shorter", f"{path}:{number}") from None
        except RecursionError:
            raise _too_deep(path, number) from None
        if line.count("[") + line.count("{") > MOST_LEVELS and _levels(row) > MOST_LEVELS:
            raise _too_deep(path, number)
        if not isinstance(row, dict):
            raise UserError("E210", "not a JSON object", "Write one JSON object a line", f"{path}:{number}")
        if "\\u" in line and not _is_unicode(row):
            what, fix = (
                "an unpaired surrogate (\\uD800 to \\uDFFF), half of a character",
                "Write the whole character, or remove it",
            )
            raise UserError("E210", what, fix, f"{path}:{number}")
        yield number, _Defaulted(row)


class _Repeated(Exception):
    """A key that occurs twice in a JSON object."""


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise _Repeated(_repeated(name for name, _ in pairs))
    return row


DECODER = json.JSONDecoder(object_pairs_hook=_without_repeats)
"""Decoder of a JSON row; creating one for every line would take longer than decoding."""


def _levels(value: Any) -> int:
    """Nesting depth of lists and objects. Computed level by level: a recursion could exceed Python's stack."""
    count, level = 0, [value]
    while level := [item for item in level if isinstance(item, list | dict)]:
        count += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return count


def _too_deep(path: Path, line: int) -> UserError:
    fix = f"Write one JSON object a line, of at most {MOST_LEVELS} levels"
    return UserError("E210", "lists or objects nested too deeply", fix, f"{path}:{line}")


def _is_unicode(row: dict) -> bool:
    """Whether a row is valid Unicode: JSON escapes may be lone surrogates."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_words(text: str, path: Path) -> Iterator[tuple[int, dict]]:
    """Read columns in CoNLL format: one word per line, its tag last, an empty line (or -DOCSTART-) between sentences."""
    words, tags, first, columns = [], [], 1, None
    for number, line in enumerate([*text.split("\n"), ""], start=1):
        line = line.strip(" \t\r")
        fields = [field.strip() for field in line.split("\t")] if "\t" in line else re.split(" +", line)
        if fields[0] in ("", "-DOCSTART-"):
            if words:
                yield first, {"tokens": words, "tags": tags}
            words, tags, first = [], [], number + 1
            continue
        columns = columns or len(fields)
        if len(fields) != columns or columns < 2:
            what = f"{len(fields)} fields where the first word has {columns}" if columns > 1 else "a word without a tag"
            raise UserError("E210", what, "Write the word first and its tag last in each line", f"{path}:{number}")
        words.append(fields[0])
        tags.append(fields[-1])


class _Defaulted(dict):
    """A JSON row: a key that only other rows have reads as None, which the checks above report with its line."""

    def __missing__(self, key: str) -> None:
        return None


def _as_row(header: list[str], fields: list[str], where: str) -> dict[str, str]:
    if len(fields) != len(header):
        raise UserError(
            "E210", f"{len(fields)} fields where the header has {len(header)}", "Fix the row, or the file's extension", where
        )
    return dict(zip(header, fields, strict=True))
