"""`compress init`: guessing the kinds of tasks whose labels are lists or marked texts, by their columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def list_column(columns: Mapping[str, Sequence[Any]]) -> str | None:
    """The only column in which every row has a list of texts; None where there is none, or several."""
    found = [name for name, values in columns.items() if all(map(_is_texts, values)) and any(values)]
    return found[0] if len(found) == 1 else None


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
