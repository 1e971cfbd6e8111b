"""`compress init`: finding the training, validation and test files of a folder, and reading them, with or without a header."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.errors import UserError
from compressor.tasks import PACKED, PARQUET, ending
from compressor.tasks.listing import NO_LABEL
from compressor.tasks.reading import Rows, read_rows
from compressor.tasks.sources.content import data_text
from pipelines.init.column_names import COLUMN_NAMES
from pipelines.init.copied_files import copies_in

ENDINGS = (".tsv", ".csv", ".jsonl", PARQUET, ".conll", ".txt")
ROLES = {
    "train": ("train", "training", "trainset"),
    "validation": ("dev", "devset", "development", "val", "valid", "validation"),
    "test": ("test", "testset", "testing"),
}
"""Roles of files, and words in their names."""
PAPERS = ("readme", "license", "licence", "source", "notice", "copying", "requirements")
"""Beginnings of the names of .txt files that hold no data."""
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
    """The training file, the validation file or None, the files called test, and those for validation that are left out."""

    train: Path
    validation: Path | None = None
    tests: tuple[Path, ...] = ()
    unused: tuple[Path, ...] = ()

    @property
    def test(self) -> Path | None:
        """The only file called test."""
        return self.tests[0] if len(self.tests) == 1 else None


def role_of(path: Path) -> str | None:
    """The role of a file (train, validation or test) by the words of its name; None for any other file."""
    stem = path.name.removesuffix(PACKED).removesuffix(ending(path)).lower()
    words = set(re.split(r"[^a-z]+", stem))
    return next((role for role, names in ROLES.items() if words & set(names)), None)


def find_files(data: Path, validates: bool = True) -> Files:
    """The files in a folder, or a file and those beside it; without one for validation unless it `validates`.

    Raises UserError E201 (there is none), E130 (ambiguous).
    """
    require_name(data.absolute())
    if not os.path.exists(data):  # Path.exists raises where the name is too long
        raise UserError("E201", "no such file or folder", "Give a data file, or a folder with them", str(data))
    if not data.is_dir() and role_of(data) is None:
        return Files(data)
    files = _originals(_data_files(data if data.is_dir() else data.absolute().parent), data)
    train = _train_of(files, data) if data.is_dir() else data
    by_role = _by_role([path for path in files if path.name != train.name])
    if not validates:
        return Files(train, None, tuple(by_role["test"]), tuple(by_role["validation"]))
    return Files(train, _only(by_role["validation"], data, "validate"), tuple(by_role["test"]))


def _train_of(files: Sequence[Path], folder: Path) -> Path:
    """The training file of a folder. Raises UserError E130."""
    if not files:
        names = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
        fix = f"Give files that end in {', '.join(ENDINGS)}, optionally compressed ({PACKED})"
        raise UserError("E130", f"no data files in this folder, which holds: {names}", fix, str(folder))
    train = _only(_by_role(files)["train"], folder, "train")
    if train is None and len(files) > 1:
        what = f"which of {', '.join(path.name for path in files[:5])} holds the training rows?"
        raise UserError("E130", what, "Name it: compress init FILE --validation FILE", str(folder))
    return train or files[0]


def _data_files(folder: Path) -> list[Path]:
    """Files that may contain rows, by their names."""
    try:
        files = [path for path in sorted(folder.iterdir()) if path.is_file() and ending(path) in ENDINGS]
    except OSError as error:
        raise UserError("E201", f"cannot be read ({error.strerror})", "Check its permissions", str(folder)) from None
    for path in files:
        require_name(path)
    return [path for path in files if not (ending(path) == ".txt" and path.name.lower().startswith(PAPERS))]


def _originals(files: list[Path], data: Path) -> list[Path]:
    """The files without the copies that an earlier `init` made of others; with them where the user names one, or nothing else
    is left."""
    copies = copies_in(files[0].parent) if files else set()
    originals = [path for path in files if path.name not in copies]
    return files if data.name in copies or not originals else originals


def require_name(path: Path) -> None:
    """Raise UserError E130 for a name that is not UTF-8, which neither a terminal nor a pipeline file can show."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError("E130", f"the name {str(path)!r} is not UTF-8", "Give the file another name") from None


def _by_role(files: Sequence[Path]) -> dict[str, list[Path]]:
    return {role: [path for path in files if role_of(path) == role] for role in ROLES}


def _only(files: list[Path], data: Path, purpose: str) -> Path | None:
    """The only file of a role, or None. Raises UserError E130 for several."""
    if len(files) < 2:
        return files[0] if files else None
    fix = "Name them: compress init FILE --validation FILE"
    raise UserError("E130", f"several files could {purpose}: {', '.join(path.name for path in files)}", fix, str(data))


def read_table(path: Path) -> DataTable:
    """Read the rows of a file. Without a header its columns are column1, column2, ..., or those of `prompt||target`.

    Raises UserError E201, E202, E203, E204, E205 (an empty header), E210, E234, E907 (pyarrow is missing).
    """
    kind = ending(path)
    if kind == ".txt" and os.path.isfile(path):
        lines = _lines(path)
        if lines and BETWEEN in lines[0][1]:
            return _table(path, _prompts(lines, path), f"lines of prompt{BETWEEN}target")
    if kind in (".tsv", ".csv"):
        unnamed = read_rows(path, header=False)
        if len(unnamed) > 1 and not is_header([list(row.values()) for _, row in unnamed]):
            return _table(path, unnamed, "no header line")
    rows = read_rows(path)
    if not rows:
        raise UserError("E204", "the file has no rows", "Give at least one row", str(path))
    return _table(path, rows)


def _table(path: Path, rows: Rows, copy: str = "") -> DataTable:
    return DataTable(path, [row for _, row in rows], copy, [line for line, _ in rows])


def _lines(path: Path) -> list[tuple[int, str]]:
    """Every line that is not empty, with its number. Raises UserError E201, E203, E215."""
    text = data_text(path).replace("\r\n", "\n")
    return [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]


def is_header(rows: Sequence[Sequence[str]]) -> bool:
    """Whether the first of several rows of one length names columns. A name is no value of its own column; it contains a usual
    one, or else no number and no sentence, unless the cells below it show that it is a name."""
    columns = [[cell.strip() for cell in column] for column in zip(*rows, strict=True)]
    repeated = [name for name, *values in columns if name and name in values]
    names = [name for name, *_ in columns]
    if any(name.lower() in COLUMN_NAMES and name not in repeated for name in names):
        return True
    if _is_counted(columns):
        return True
    if repeated or any(map(NUMBER.fullmatch, names)):
        return False
    return not any(map(_is_value, names)) or any(map(_is_above_numbers, columns))


def _is_counted(columns: Sequence[Sequence[str]]) -> bool:
    """Whether the first cells count 0, 1, ..., as pandas names columns (and not the rows' index before them), with a text in
    most rows of one of them: in a row of data that begins so a text would be a number."""
    counted = columns[not columns[0][0] :]
    numbers = [str(place) for place in range(len(counted))]
    return [name for name, *_ in counted] == numbers and any(
        2 * sum(bool(cell) and not NUMBER.fullmatch(cell) for cell in values) > len(values) for _, *values in counted
    )


def _is_above_numbers(column: Sequence[str]) -> bool:
    """Whether the first cell is a text, and no mark of a missing number, and the others are numbers, most of them given."""
    name, *values = column
    given = [cell for cell in values if cell]
    missing = name.lower() in (*(mark.lower() for mark in NO_LABEL), "none")
    is_text = any(map(str.isalpha, name)) and not missing
    return is_text and 2 * len(given) > len(values) and all(map(NUMBER.fullmatch, given))


def _is_value(cell: str) -> bool:
    """Whether a cell holds a number or a sentence, which no column is called."""
    return bool(NUMBER.fullmatch(cell)) or len(cell.split()) > 6 or (" " in cell and cell[-1] in ".!?")


def _prompts(lines: Sequence[tuple[int, str]], path: Path) -> Rows:
    """Rows from lines of the form `prompt||target`. Raises UserError E210 for a line of another form."""
    for number, line in lines:
        if line.count(BETWEEN) != 1:
            what = f"the line is not of the form prompt{BETWEEN}target, as the first"
            raise UserError("E210", what, f"Write '{BETWEEN}' once in each line", f"{path}:{number}")
    return [(number, dict(zip(("prompt", "target"), line.split(BETWEEN), strict=True))) for number, line in lines]
