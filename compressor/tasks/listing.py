"""Lists of column and class names for error messages."""

from __future__ import annotations

from collections.abc import Sequence

MOST_NAMED = 20


def listed(names: Sequence[str]) -> str:
    """'a, b, c'; of many names only the first ones, and how many more there are."""
    more = f" and {len(names) - MOST_NAMED:,} more" if len(names) > MOST_NAMED else ""
    return ", ".join(f"{name:.60}" for name in names[:MOST_NAMED]) + more
