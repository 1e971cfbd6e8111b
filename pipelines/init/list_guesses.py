"""`compress init`: guessing the kinds of tasks whose labels are lists or objects, by their columns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from compressor.tasks.kinds.multilabel import cells_of
from compressor.tasks.kinds.spans import answer_pairs
from compressor.tasks.kinds.tokens import is_tag
from pipelines.init.column_names import LABELS

Columns = Mapping[str, Sequence[Any]]
PREMISES = ("premise", "question", "context", "startphrase", "sent1", "goal", "text", "ctx", "sentence")
CHOICES = ("choices", "endings", "options")
CHOICE = re.compile("(choice|ending|option|sol|answer)_?[0-9]")
RIGHT = ("label", "answer", "gold", "gold_label")
"""Usual names of the columns of multiple choice."""


def list_column(columns: Columns) -> str | None:
    """The first column with a usual name that holds lists of labels; some may be missing, which reading the rows refuses. Else
    the only column in which every row has a list of labels, rather than one of `numbers_as_text`; None where there is none, or
    several."""
    found = []
    for name, values in columns.items():
        lists = [labels_of(value) for value in values if value is not None]
        if any(lists) and None not in lists:
            found.append(name)
    spelt = {name.strip().lower(): name for name in found}
    whole = [name for name in found if None not in columns[name]]
    whole = [name for name in whole if not numbers_as_text(columns[name])] or whole
    return next((spelt[name] for name in LABELS if name in spelt), whole[0] if len(whole) == 1 else None)


def numbers_as_text(values: Sequence[Any]) -> bool:
    """Whether lists of labels are texts that spell numbers alone: offsets and other numbers of rows are written so, too."""
    lists = [labels_of(value) for value in values if isinstance(value, str)]
    return any(lists) and not any(isinstance(item, str) for items in lists for item in items or ())


def answer_columns(columns: Columns) -> tuple[str, str, str] | None:
    """The columns of questions, of contexts and of answers in SQuAD's form; None where one is missing."""
    spelt = {name.strip().lower(): name for name in columns}
    if not {"question", "context"} <= set(spelt):
        return None
    found = [
        name for name, values in columns.items() if not any(map(_is_plain, values)) and None not in map(answer_pairs, values)
    ]
    return (spelt["question"], spelt["context"], found[0]) if len(found) == 1 else None


def choice_columns(columns: Columns) -> tuple[tuple[str, ...], str] | None:
    """The columns of texts and of choices, numbered or one of lists, and of the right choice's number; None where one is
    missing."""
    spelt = {name.strip().lower(): name for name in columns}
    first, label = (next((spelt[name] for name in names if name in spelt), None) for names in (PREMISES, RIGHT))
    numbered = [name for name in columns if CHOICE.fullmatch(name.strip().lower())]
    listed = [name for key, name in spelt.items() if key in CHOICES and all(map(_is_texts, columns[name]))]
    found = numbered if len(numbered) > 1 else listed
    return ((first, *found), label) if first and label and found else None


def marked_columns(columns: Columns) -> tuple[tuple[str, ...], str] | None:
    """The columns of a text, of span1 and span2, and of the label; None where one is missing."""
    spelt = {name.strip().lower(): name for name in columns}
    names = ("text", "span1", "span2", "label")
    return (tuple(spelt[name] for name in names[:3]), spelt["label"]) if set(names) <= set(spelt) else None


def labels_of(value: Any) -> list | None:
    """The labels in a cell that holds a list of texts or of integers, or such a list as text, where an empty cell is a row
    without a label; None for any other cell."""
    cells = cells_of(value) if isinstance(value, str) and value.strip()[:1] in ("", "[") else value
    whole = isinstance(cells, list) and all(isinstance(item, str) or type(item) is int for item in cells)
    return cells if whole else None


def are_tags(values: Sequence[list]) -> bool:
    """Whether lists hold tags of words (O, B-TYPE, I-TYPE) and nothing else."""
    return any(values) and all(is_tag(item) for value in values for item in value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_plain(value: Any) -> bool:
    return not isinstance(value, list | dict) and not (isinstance(value, str) and value.lstrip().startswith(("{", "[")))
