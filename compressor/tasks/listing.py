"""Names of columns and classes, and cells of data files: how messages show them, and names that occur twice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from compressor.errors import UserError

MOST_NAMED = 20

NO_LABEL = ("-", "?", "N/A", "n/a", "NA", "nan", "NaN", "null", "NULL")
"""What stands for a missing label in data sets with labels in words: SNLI has -, pandas writes nan."""


def listed(names: Sequence[str]) -> str:
    """'a, b, c'; of many names only the first ones, and how many more there are."""
    more = f" and {len(names) - MOST_NAMED:,} more" if len(names) > MOST_NAMED else ""
    return ", ".join(f"{name:.60}" for name in names[:MOST_NAMED]) + more


def cell_shown(cell: object) -> str:
    """A cell of a data file for a message, its end left out if it is long; a missing one, or a null of JSON, is None only to
    Python."""
    text = "nothing" if cell is None else repr(cell)
    return text if len(text) <= 60 else f"{text[:56]}...{text[-1]}"


def repeated(names: Iterable[str]) -> str | None:
    """The first name that occurs a second time."""
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)


def require_distinct(names: Sequence[str], path: Path) -> None:
    """Raise UserError E216 for a column that occurs twice, because it is ambiguous."""
    if name := repeated(filter(None, names)):
        what = f"column '{name:.60}' appears twice in the header"
        raise UserError("E216", what, "Rename or drop one of them", f"{path}:1")
