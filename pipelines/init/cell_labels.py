"""The labels in a cell that nobody has checked yet, by kind of task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from compressor.tasks.kinds.multilabel import cells_of
from compressor.tasks.kinds.tokens import OUTSIDE


def _label(cell: Any) -> set[str]:
    return {str(cell).strip()}


def _labels(cell: Any) -> set[str]:
    return {str(label).strip() for label in cells_of(cell) or ()}


def _types(tags: Any) -> set[str]:
    """The types of a sentence's entities."""
    return {str(tag)[2:] for tag in tags if tag != OUTSIDE} if isinstance(tags, list) else set()


LABELS_IN: Mapping[str, Callable[[Any], set[str]]] = {
    "classification": _label,
    "marked": _label,
    "multilabel": _labels,
    "tokens": _types,
}
"""Of the kinds that know only the labels of the training rows: a cell, not checked yet -> the labels in it."""
