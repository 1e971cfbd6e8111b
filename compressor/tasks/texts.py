"""Texts without labels, from which a model learns a teacher's outputs: read and checked as the task's rows are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from compressor.errors import UserError
from compressor.models.build import TOKENS
from compressor.tasks import TaskConfig, ending
from compressor.tasks.reading import Rows, TaskData, read_rows, read_tests, require_columns, require_sentences
from compressor.tasks.rows import Row, Split, spaced
from compressor.tasks.sources.content import data_text
from compressor.tasks.task_kind import TaskKind, kind_of

LINES = ".txt"
"""Ending of a file with one text (for token classification: words separated by spaces) per line."""


def read_texts(path: Path, task: TaskConfig) -> Split:
    """The texts of a file, with placeholders for labels. Raises UserError E201 to E206, E210, E214 to E216."""
    kind = kind_of(task.kind)
    rows = _rows(path, task, kind.auto_class == TOKENS)
    require_columns(rows, task.text_columns, path)
    texts = [kind.texts(row, task, path, line) for line, row in rows]
    require_sentences(texts, task, path)
    return unlabelled(texts, [line for line, _ in rows], kind)


def _rows(path: Path, task: TaskConfig, of_words: bool) -> Rows:
    """Cells by column, with the number of the line; `of_words` splits a line at its spaces."""
    if ending(path) != LINES:
        return read_rows(path, task.header is not False, skip_broken=task.broken_rows is not None)
    if len(task.text_columns) > 1:
        what = f"a {LINES} file has one text per line, a row of this task has {len(task.text_columns)}"
        raise UserError("E202", what, "Give a .tsv, .csv or .jsonl file with the task's columns", str(path))
    column, lines = task.text_columns[0], enumerate(data_text(path).split("\n"), start=1)
    return [(number, {column: text.split() if of_words else text.strip()}) for number, text in lines if text.strip()]


def unlabelled(texts: list[Row], lines: list[int], kind: TaskKind) -> Split:
    """Rows with placeholders for labels."""
    return Split(texts, [kind.placeholder(row) for row in texts], lines)


def task_texts(task: TaskConfig, data: TaskData) -> set[Row]:
    """The texts of all rows in the task's files."""
    return set(_texts_in_order(task, data))


def _texts_in_order(task: TaskConfig, data: TaskData) -> Iterator[Row]:
    tests = read_tests(task, data.label_names).values()
    return (texts for rows in (data.train, data.validation, *tests) for texts in rows.texts)


def new_texts(split: Split, task: TaskConfig, data: TaskData, path: Path, alike: Callable[[Row], Row] = spaced) -> Split:
    """The texts that occur in no file of the task, each once; those for which `alike` gives the same are equal. Raises
    UserError E204 where there is none, E223 for another number of choices.

    A row that quality is measured on must not be learnt from; a training row is trained on anyway.
    """
    if (texts := len(split.texts[0])) != (theirs := len(data.train.texts[0])):
        what = f"rows of {texts - 1} choices, the task has {theirs - 1}"
        raise UserError("E223", what, "Give every row as many choices", f"{path}:{split.lines[0]}")
    new = _new_rows(split.texts, list(_texts_in_order(task, data)), alike)
    if not new:
        raise UserError("E204", "every text is in a file of the task", "Give other texts", str(path))
    return split.at(new)


MOST_HELD = 2
"""Results of `_new_rows` that are held: a run asks for one by spaces alone, and for one as the base reads texts."""
_HELD: dict[tuple[str, Callable[[Row], Row]], np.ndarray] = {}


def _new_rows(rows: Sequence[Row], known: Sequence[Row], alike: Callable[[Row], Row]) -> list[int]:
    """The numbers of the rows whose `alike` is that of no `known` row, and of no row before. A normalizer takes as long as a
    tokenizer, and a check, a stage and a sweep's trials ask for the same: for equal texts this is computed once."""
    key = _digest(rows, known), alike
    if key not in _HELD:
        seen = set(map(alike, set(known)))
        new = [row for row, texts in enumerate(map(alike, rows)) if texts not in seen and not seen.add(texts)]
        while len(_HELD) >= MOST_HELD:
            del _HELD[next(iter(_HELD))]
        _HELD[key] = np.array(new, dtype=np.int64)  # a list of integers takes four times the memory
    return _HELD[key].tolist()


def _digest(*columns: Sequence[Row]) -> str:
    """sha256 of the texts of all rows in order."""
    made = hashlib.sha256()
    for rows in columns:
        made.update(f"{len(rows)}\n".encode())
        for texts in rows:
            made.update(repr(texts).encode())
    return made.hexdigest()
