"""`compress init`: guessing the kinds of tasks whose labels are lists or objects, by their columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compressor.tasks.kinds.answers import answer_pairs

Columns = Mapping[str, Sequence[Any]]


def list_column(columns: Columns) -> str | None:
    """The only column in which every row has a list of texts; None where there is none, or several."""
    found = [name for name, values in columns.items() if all(map(_is_texts, values)) and any(values)]
    return found[0] if len(found) == 1 else None


def answer_columns(columns: Columns) -> tuple[str, str, str] | None:
    """The columns of questions, of contexts and of answers in SQuAD's form; None where one is missing."""
    spelt = {name.strip().lower(): name for name in columns}
    if not {"question", "context"} <= set(spelt):
        return None
    found = [
        name for name, values in columns.items() if not any(map(_is_plain, values)) and None not in map(answer_pairs, values)
    ]
    return (spelt["question"], spelt["context"], found[0]) if len(found) == 1 else None


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_plain(value: Any) -> bool:
    return not isinstance(value, list | dict) and not (isinstance(value, str) and value.lstrip().startswith(("{", "[")))
