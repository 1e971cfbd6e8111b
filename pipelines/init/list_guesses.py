"""`compress init`: guessing the kinds of tasks whose labels are lists or objects, by their columns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from compressor.tasks.kinds.spans import answer_pairs
from pipelines.init.column_names import LABELS

Columns = Mapping[str, Sequence[Any]]
PREMISES = ("premise", "question", "context", "startphrase", "sent1", "goal", "text", "ctx", "sentence")
CHOICES = ("choices", "endings", "options")
CHOICE = re.compile("(choice|ending|option|sol|answer)_?[0-9]")
RIGHT = ("label", "answer", "gold", "gold_label")
"""Usual names of the columns of multiple choice."""


def list_column(columns: Columns) -> str | None:
    """The first column with a usual name that holds lists of labels; some may be missing, which reading the rows refuses. Else
    the only column in which every row has a list of labels; None where there is none, or several."""
    found = [
        name for name, values in columns.items() if any(values) and all(value is None or is_labels(value) for value in values)
    ]
    spelt = {name.strip().lower(): name for name in found}
    whole = [name for name in found if None not in columns[name]]
    return next((spelt[name] for name in LABELS if name in spelt), whole[0] if len(whole) == 1 else None)


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


def is_labels(value: Any) -> bool:
    """Whether a cell is a list of labels: of texts, or of integers."""
    return isinstance(value, list) and all(isinstance(item, str) or type(item) is int for item in value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_plain(value: Any) -> bool:
    return not isinstance(value, list | dict) and not (isinstance(value, str) and value.lstrip().startswith(("{", "[")))
