"""Texts without labels, from which a model learns a teacher's outputs: read and checked as the task's rows are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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
    tests = read_tests(task, data.label_names).values()
    return {texts for rows in (data.train, data.validation, *tests) for texts in rows.texts}


def new_texts(split: Split, task: TaskConfig, data: TaskData, path: Path, alike: Callable[[Row], Row] = spaced) -> Split:
    """The texts that occur in no file of the task, each once; those for which `alike` gives the same are equal. Raises
    UserError E204 where there is none, E223 for another number of choices.

    A row that quality is measured on must not be learnt from; a training row is trained on anyway.
    """
    if (texts := len(split.texts[0])) != (theirs := len(data.train.texts[0])):
        what = f"rows of {texts - 1} choices, the task has {theirs - 1}"
        raise UserError("E223", what, "Give every row as many choices", f"{path}:{split.lines[0]}")
    seen = set(map(alike, task_texts(task, data)))
    new = [row for row, texts in enumerate(map(alike, split.texts)) if texts not in seen and not seen.add(texts)]
    if not new:
        raise UserError("E204", "every text is in a file of the task", "Give other texts", str(path))
    return Split(*([column[row] for row in new] for column in (split.texts, split.labels, split.lines)))
