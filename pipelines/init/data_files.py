"""`compress init`: finding the training and validation files of a folder, and reading them, with or without a header."""

from __future__ import annotations

import csv
import io
import os
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.errors import UserError
from compressor.tasks import PACKED, PARQUET, ending
from compressor.tasks.reading import read_rows
from compressor.tasks.sources.content import data_text
from pipelines.init.column_names import COLUMN_NAMES

ENDINGS = (".tsv", ".csv", ".jsonl", PARQUET, ".conll", ".txt")
ROLES = {
    "train": ("train", "training", "trainset"),
    "validation": ("dev", "devset", "development", "val", "valid", "validation"),
    "test": ("test", "testset", "testing"),
}
"""Roles of files, and words in their names."""
PAPERS = ("readme", "license", "licence", "source", "notice", "copying", "requirements")
"""Text files that hold no data."""
BETWEEN = "||"
"""Separator of prompt and target in the line format of the E2E data."""
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


@dataclass(frozen=True)
class DataTable:
    """One data file: its rows, column by column, and the line of each (of Parquet its number). `copy` is the reason why a
    pipeline needs a copy of it in another form."""

    path: Path
    rows: Sequence[dict[str, Any]]
    copy: str = ""
    lines: Sequence[int] = ()

    @property
    def columns(self) -> list[str]:
        return list(self.rows[0])

    def values(self, column: str) -> list[Any]:
        """One column, None where a row has no such key."""
        return [row.get(column) for row in self.rows]


@dataclass(frozen=True)
class Files:
    """The training file, and the validation file or None. `test` is a file called test."""

    train: Path
    validation: Path | None = None
    test: Path | None = None


def role_of(path: Path) -> str | None:
    """The role of a file (train, validation or test) by the words of its name; None for any other file."""
    stem = path.name.removesuffix(PACKED).removesuffix(ending(path)).lower()
    words = set(re.split(r"[^a-z]+", stem))
    return next((role for role, names in ROLES.items() if words & set(names)), None)


def find_files(data: Path) -> Files:
    """The files in a folder, or a file and those beside it. Raises UserError E201 (there is none), E130 (ambiguous)."""
    require_name(data.absolute())
    if not os.path.exists(data):  # Path.exists raises where the name is too long
        raise UserError("E201", "no such file or folder", "Give a data file, or a folder with them", str(data))
    if data.is_dir():
        return _in_folder(data)
    if role_of(data) is None:
        return Files(data)
    by_role = _by_role([path for path in _data_files(data.absolute().parent) if path.name != data.name], data)
    return Files(data, _only(by_role["validation"], data, "validate"), _only(by_role["test"], data, "test"))


def _in_folder(folder: Path) -> Files:
    files = _data_files(folder)
    if not files:
        names = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
        fix = f"Give files that end in {', '.join(ENDINGS)}, optionally compressed ({PACKED})"
        raise UserError("E130", f"no data files in this folder, which holds: {names}", fix, str(folder))
    by_role = _by_role(files, folder)
    train = _only(by_role["train"], folder, "train")
    if train is None and len(files) > 1:
        what = f"which of {', '.join(path.name for path in files[:5])} holds the training rows?"
        raise UserError("E130", what, "Name it: compress init FILE --validation FILE", str(folder))
    train = train or files[0]
    return Files(train, _only(by_role["validation"], folder, "validate"), _only(by_role["test"], folder, "test"))


def _data_files(folder: Path) -> list[Path]:
    """Files that may contain rows, by their names."""
    try:
        files = [path for path in sorted(folder.iterdir()) if path.is_file() and ending(path) in ENDINGS]
    except OSError as error:
        raise UserError("E201", f"cannot be read ({error.strerror})", "Check its permissions", str(folder)) from None
    for path in files:
        require_name(path)
    return [path for path in files if not path.name.lower().startswith(PAPERS)]


def require_name(path: Path) -> None:
    """Raise UserError E130 for a name that is not UTF-8, which neither a terminal nor a pipeline file can show."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError("E130", f"the name {str(path)!r} is not UTF-8", "Give the file another name") from None


def _by_role(files: Sequence[Path], data: Path) -> dict[str, list[Path]]:
    return {role: [path for path in files if role_of(path) == role] for role in ROLES}


def _only(files: list[Path], data: Path, purpose: str) -> Path | None:
    """The only file of a role, or None. Raises UserError E130 for several."""
    if len(files) < 2:
        return files[0] if files else None
    if purpose == "test":
        return None
    fix = "Name them: compress init FILE --validation FILE"
    raise UserError("E130", f"several files could {purpose}: {', '.join(path.name for path in files)}", fix, str(data))


def read_table(path: Path) -> DataTable:
    """Read the rows of a file. Without a header its columns are column1, column2, ..., or those of `prompt||target`.

    Raises UserError E201, E202, E203, E204, E205 (an empty header), E210, E907 (pyarrow is missing).
    """
    kind = ending(path)
    if kind in (".tsv", ".csv", ".txt") and os.path.isfile(path):
        numbered = _fields(path)
        lines, fields = [line for line, _ in numbered], [row for _, row in numbered]
        if kind == ".txt" and fields and BETWEEN in fields[0][0]:
            return DataTable(path, _prompts(fields, path), f"lines of prompt{BETWEEN}target", lines)
        if kind != ".txt" and len(fields) > 1 and not is_header(fields):
            return DataTable(path, _unnamed(fields, path), "no header line", lines)
    rows = read_rows(path)
    if not rows:
        raise UserError("E204", "the file has no rows", "Give at least one row", str(path))
    return DataTable(path, [row for _, row in rows], lines=[line for line, _ in rows])


def _fields(path: Path) -> list[tuple[int, list[str]]]:
    """Every line that is not empty, with its number, split into fields without further checks. Raises UserError E201, E203,
    E215."""
    text = data_text(path)
    if ending(path) == ".csv":
        try:
            return list(_csv_fields(text))
        except csv.Error:
            return []  # the next reader reports what is wrong, and where
    lines = [(number, line) for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1) if line.strip()]
    return [(number, line.split("\t") if ending(path) == ".tsv" else [line]) for number, line in lines]


def _csv_fields(text: str) -> Iterator[tuple[int, list[str]]]:
    """The rows of CSV that are not empty, with the number of the first line of each. Raises csv.Error."""
    reader, first = csv.reader(io.StringIO(text, newline="")), 1
    for fields in reader:
        if fields:
            yield first, fields
        first = reader.line_num + 1


def is_header(fields: Sequence[Sequence[str]]) -> bool:
    """Whether the first line names columns: it contains a usual name, or else no number, no sentence, and no value of its own
    column."""
    first, others = fields[0], fields[1:]
    if COLUMN_NAMES & {name.strip().lower() for name in first}:
        return True
    for place, name in enumerate(first):
        word = name.strip()
        if NUMBER.fullmatch(word) or len(word.split()) > 6 or (" " in word and word[-1] in ".!?"):
            return False
        if word and any(len(row) > place and row[place].strip() == word for row in others):
            return False
    return True


def _unnamed(fields: Sequence[Sequence[str]], path: Path) -> list[dict[str, str]]:
    """Rows of a file without a header. Raises UserError E210 where they differ in length."""
    width = len(fields[0])
    for number, row in enumerate(fields, start=1):
        if len(row) != width:
            what = f"row {number} has {len(row)} fields, the first {width}, and no line names the columns"
            raise UserError("E210", what, "Give the file a first line with the names of its columns", str(path))
    return [{f"column{place}": value for place, value in enumerate(row, start=1)} for row in fields]


def _prompts(fields: Sequence[Sequence[str]], path: Path) -> list[dict[str, str]]:
    """Rows from lines of the form `prompt||target`. Raises UserError E210 for a line of another form."""
    for number, (line,) in enumerate(fields, start=1):
        if line.count(BETWEEN) != 1:
            what = f"row {number} is not of the form prompt{BETWEEN}target, as the first"
            raise UserError("E210", what, f"Write '{BETWEEN}' once in each line", str(path))
    return [dict(zip(("prompt", "target"), line.split(BETWEEN), strict=True)) for (line,) in fields]


def split_rows(table: DataTable, share: float, label: str | None, together: str | None = None) -> tuple[DataTable, DataTable]:
    """(training rows, validation rows): a random share of each class where `label` names the column of classes, the same every
    time. Every class keeps a training row. Rows with equal values of the column `together` stay on one side: the references of
    a prompt, which would otherwise be validated with a prompt that was trained on. Raises UserError E130 if a side would be
    empty."""
    units: dict[object, list[int]] = {}
    for number, value in enumerate(table.values(together) if together else range(len(table.rows))):
        units.setdefault(str(value).strip(), []).append(number)
    classes, groups = table.values(label) if label else [None] * len(table.rows), {}
    for numbers in units.values():
        groups.setdefault(str(classes[numbers[0]]), []).append(numbers)
    draw, chosen = random.Random(0), set()
    for members in groups.values():
        drawn = draw.sample(members, min(round(share * len(members)), len(members) - 1))
        chosen |= {number for numbers in drawn for number in numbers}
    noun = "prompt" if together else "row"
    if not chosen:
        what = f"a share of {share:g} of {len(units)} {noun}s is no {noun}"
        raise UserError("E130", what, "Give a larger --split, or a --validation file", str(table.path))
    why = f"{share:.0%} of the {noun}s are set apart to validate"
    sides = ([number for number in range(len(table.rows)) if (number in chosen) == drawn] for drawn in (False, True))
    train, validation = (
        DataTable(table.path, [table.rows[number] for number in side], why, [table.lines[number] for number in side])
        for side in sides
    )
    return train, validation
