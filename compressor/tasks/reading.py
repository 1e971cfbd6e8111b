"""Data files -> rows: CSV, TSV (no quoting), JSON lines, Parquet and columns of words, each also gzipped; checked once, here,
with the line of each fault (of Parquet, the row)."""

from __future__ import annotations

import csv
import difflib
import io
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from compressor.digests import kept_by_files
from compressor.errors import UserError, UserErrors
from compressor.tasks import PACKED, PARQUET, TABLES, Subset, TaskConfig, data_files, ending
from compressor.tasks.decoding.prompt_items import check_references
from compressor.tasks.listing import listed, repeated, require_distinct
from compressor.tasks.rows import Split
from compressor.tasks.sources.content import MOST_OF_A_ROW, data_text, row_too_long
from compressor.tasks.sources.parquet_rows import parquet_rows
from compressor.tasks.task_kind import TaskKind, kind_for, kind_of

Rows = list[tuple[int, dict[str, object]]]
WORD_FILES = (".conll", ".txt")
"""Endings of files with a word a line; the line number of a row is that of its first word."""

SEPARATORS = (",", ";", "\t")
"""Of the fields of .csv: where a comma is the decimal point, spreadsheets write semicolons."""

CONVERTED = {".json": "Write one JSON object a line, as .jsonl", **dict.fromkeys((".xlsx", ".xls", ".ods"), "Save it as .csv")}
"""Ending of a file that is not read -> what to make of it."""

MOST_LEVELS = 50
"""Deepest nesting of a JSON row; the existing kinds of tasks need two levels."""


@dataclass(frozen=True)
class TaskData:
    """Both splits, and the label names in the order of the model's outputs."""

    train: Split
    validation: Split
    label_names: list[str]


@kept_by_files(data_files)
def check_data(task: TaskConfig) -> tuple[list[str], int]:
    """Read every file and raise UserErrors (E2xx) with all faults in them, E217 and E218 for a metric that does not fit; the
    label names, and the number of training rows. A process reads unchanged files once."""
    data = _read(task, task.tests)
    return data.label_names, len(data.train)


def read_task(task: TaskConfig) -> TaskData:
    """Read and check training and validation. Raises UserErrors with E2xx faults of both files, one line each, E217, E218."""
    return _read(task, {})


def read_tests(task: TaskConfig, names: list[str]) -> dict[str, Split]:
    """Read and check the files that are only scored, by name. Raises UserErrors with their E2xx faults."""
    return {
        name: _split(path, rows, names, task)
        for (name, path), rows in zip(task.tests.items(), _columns_of(task.tests.values(), task), strict=True)
    }


def _read(task: TaskConfig, tests: Mapping[str, Path]) -> TaskData:
    """Training and validation; the `tests` are only checked."""
    paths = (task.train, task.validation, *tests.values())
    columns = _columns_of(paths, task)
    names = kind_of(task.kind).outputs(task, [label for _, _, label in columns[0]])
    kind = kind_for(task, names)
    train, validation, *scored = (_split(path, rows, names, task) for path, rows in zip(paths, columns, strict=True))
    if task.decode:
        # files that are only scored are scored by texts where these give the main metric
        decoded = (validation, *(scored if kind.metric.of_texts else ()))
        for split, path in zip(decoded, paths[1:], strict=False):
            check_references(split, task.decode, path)
    return TaskData(train if task.subset is None else _drawn(train, task.subset, names, task.train, kind), validation, names)


CheckedRows = list[tuple[int, tuple[Any, ...], Any]]
"""(line, texts, label) of every row of one file."""


def _columns_of(paths: Iterable[Path], task: TaskConfig) -> list[CheckedRows]:
    """The rows of each file. Raises UserErrors with the faults of all of them."""
    faults: list[UserError] = []
    columns = []
    for path in paths:
        try:
            columns.append(_checked_columns(path, task))
        except UserError as error:
            faults.append(error)
    if faults:
        raise UserErrors(faults)
    return columns


def _split(path: Path, rows: CheckedRows, names: list[str], task: TaskConfig) -> Split:
    """The rows of a file with their labels as targets. Raises UserError E208, E209."""
    targets = kind_of(task.kind).targets(path, [(line, label) for line, _, label in rows], names)
    return Split([text for _, text, _ in rows], targets, [line for line, _, _ in rows])


def _drawn(train: Split, subset: Subset, names: list[str], path: Path, kind: TaskKind) -> Split:
    """The rows that `subset` samples. Raises UserError E211 when they lack what training needs."""
    rows = subset.sample(len(train))
    drawn = train.at(rows)
    if missing := kind.lacks(drawn.labels, names):
        what = f"the subset of {len(rows)} of {len(train)} rows (seed {subset.seed}) holds {missing}"
        raise UserError("E211", what, "Raise subset.share, take another subset.seed, or add such rows", str(path))
    return drawn


def _checked_columns(path: Path, task: TaskConfig) -> CheckedRows:
    """Every row of one file. Of each only what the task names is held: there may be hundreds of other columns."""
    kind, checked, classes = kind_of(task.kind), [], []
    rows = rows_in(path, task.header is not False, skip_broken=task.broken_rows is not None)
    first = [*islice(rows, 1)]
    require_columns(first, (*task.text_columns, task.label), path)
    for line, row in chain(first, rows):
        for single in _with_each(row, task.label) if kind.generates else [row]:
            checked.append((line, *kind.example(single, task, path, line)))
            classes += [(line, name) for name in kind.classes(single[task.label])]
    require_one_type(classes, task.label, path)
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
    for position, name in enumerate(task.text_columns[: kind_of(task.kind).sentences]):
        if all(_is_number(row[position]) for row in texts):
            raise UserError(
                "E206", f"column '{name}' holds only numbers", "Name the column that holds the sentences", f"{path}:1"
            )


def require_one_type(labels: Sequence[tuple[int, object]], name: str, path: Path) -> None:
    """Raises UserError E235 for labels of different types in one file (1 and "one"), or one number in two spellings (1, 1.0):
    they would be different classes, or one class by accident."""
    words = {str: "text", int: "an integer", bool: "true or false"}
    first_line, first = labels[0] if labels else (0, None)
    seen, spelt = set(), {}
    for line, label in labels:
        if (type(label), label) in seen:
            continue
        seen.add((type(label), label))
        if type(label) is not type(first):
            what = f"column '{name}' holds {words.get(type(label), type(label).__name__)}, {label!r:.60}"
            what += f", where line {first_line} holds {words.get(type(first), type(first).__name__)}, {first!r:.60}"
            raise UserError("E235", what, "Write all labels as text, or all as integers", f"{path}:{line}")
        text = str(label).strip()
        # 1_2 is 12 to Python alone
        if (
            "_" not in text
            and _is_number(text)
            and math.isfinite(float(text))
            and (other := spelt.setdefault(float(text), text)) != text
        ):
            what = f"label '{text:.60}' is the same number as '{other:.60}' in an earlier row, and would be another class"
            raise UserError("E235", what, "Write each class in one way", f"{path}:{line}")


def _nearest_column(name: str, columns: list[str]) -> str:
    near = difflib.get_close_matches(name, columns, n=1)
    return f"Did you mean '{near[0]}'?" if near else f"The file has: {listed(columns)}"


def _is_number(text: Any) -> bool:
    try:
        float(text)
    except (ValueError, TypeError):  # not a tuple of words
        return False
    return True


def read_rows(path: Path, header: bool = True, *, skip_broken: bool = False) -> Rows:
    """All `rows_in` a file, with all their columns."""
    return list(rows_in(path, header, skip_broken=skip_broken))


def rows_in(path: Path, header: bool = True, *, skip_broken: bool = False) -> Iterator[tuple[int, dict[str, object]]]:
    """Every row with the number of its first line (of Parquet, with its own). `header`: whether the first line of .csv and
    .tsv names the columns; `skip_broken`: whether their rows with another number of fields are left out.

    Raises UserError E201, E202, E203, E210, E215, E216, E234, E236, E907.
    """
    texts = {".jsonl": _read_jsonl, **dict.fromkeys(WORD_FILES, _read_words)}
    suffix = ending(path)
    if suffix not in (*TABLES, *texts, PARQUET) and os.path.isfile(path):  # a folder or a pipe is reported as such below
        fix = CONVERTED.get(suffix) or f"Use {', '.join((*TABLES, *texts, PARQUET))}, optionally compressed ({PACKED})"
        raise UserError("E202", f"unknown file extension '{suffix or path.suffix}'", fix, str(path))
    if suffix == PARQUET:
        rows = parquet_rows(path)
    elif suffix in TABLES:
        rows = _table_rows(path, header, skip_broken)
    else:
        text = data_text(path)
        rows = texts[suffix](text, path)
    return _bounded(rows, path)


@kept_by_files(lambda path, task: (path,))
def skipped_lines(path: Path, task: TaskConfig) -> list[int]:
    """The lines of the rows in a file of the task that its `broken_rows: skip` leaves out. Raises as `read_rows`."""
    if task.broken_rows is None or ending(path) not in TABLES:
        return []
    names, rows = _table(path, task.header is not False)
    return [line for line, fields in rows if len(fields) != len(names)]


def _bounded(rows: Iterable[tuple[int, dict]], path: Path) -> Iterator[tuple[int, dict]]:
    """The same rows. Raises UserError E234 for one that is too long: a quote that closes late, a whole file in one cell."""
    for line, row in rows:
        if (size := sum(len(cell) for cell in row.values() if isinstance(cell, str))) > MOST_OF_A_ROW:
            raise row_too_long(size, f"{path}:{line}")
        yield line, row


def _table_rows(path: Path, header: bool, skip_broken: bool) -> Iterator[tuple[int, dict]]:
    """The rows of a .csv or .tsv file. Raises UserError E210 for another number of fields, unless `skip_broken`."""
    names, rows = _table(path, header)
    for line, fields in rows:
        if len(fields) == len(names):
            yield line, dict(zip(names, fields, strict=True))
        elif not skip_broken:
            first = "the header" if header else "the first row"
            what = f"{len(fields)} fields where {first} has {len(names)}"
            raise UserError("E210", what, "Fix the row, or the file's extension", f"{path}:{line}")


def _table(path: Path, header: bool) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """The column names of a .csv or .tsv file, and the fields of every row that is not empty, with its first line."""
    lines = (_csv_lines if ending(path) == ".csv" else _tsv_lines)(data_text(path), path)
    first = next(lines, (1, []))
    rows = lines if header else chain([first], lines)
    return _names(first[1], path, header), ((line, fields) for line, fields in rows if fields)


def _tsv_lines(text: str, path: Path) -> Iterator[tuple[int, list[str]]]:
    """The fields of every line in GLUE's dialect of TSV: tabs, no quoting."""
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        yield number, line.split("\t") if line else []


def _csv_lines(text: str, path: Path) -> Iterator[tuple[int, list[str]]]:
    # newline="": lines end as csv ends them; splitlines() would also break rows at U+2028 and the like.
    # strict=True makes a quote that never closes an error instead of one giant field
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # a process-wide limit, 131,072 by default
    stream = io.StringIO(text, newline="")
    reader = csv.reader(stream, delimiter=_separator(stream), strict=True)
    line = 1
    try:
        for fields in reader:
            yield line, fields
            line = reader.line_num + 1
    except csv.Error as error:
        raise UserError("E210", f"not CSV ({error})", "Check the quotes", f"{path}:{line}") from None


def _separator(stream: io.StringIO) -> str:
    """What separates the fields of a .csv file: the first of SEPARATORS that occurs outside quotes in its first row."""
    return next((separator for separator in SEPARATORS if _fields_of_first_row(stream, separator) > 1), SEPARATORS[0])


def _fields_of_first_row(stream: io.StringIO, separator: str) -> int:
    """Their number, 0 where it cannot be read so; the stream is then at its beginning again."""
    try:
        return len(next(csv.reader(stream, delimiter=separator, strict=True), []))
    except csv.Error:
        return 0
    finally:
        stream.seek(0)


def _names(first: list[str], path: Path, header: bool) -> list[str]:
    """The column names, from the first line or, without a header, column1, column2, ... Raises UserError E216."""
    if not header:
        return [f"column{place}" for place in range(1, len(first) + 1)]
    require_distinct(first, path)
    return first


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
        raise _Repeated(repeated(name for name, _ in pairs))
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
