"""Names of columns and classes as an error lists them."""

from __future__ import annotations

from collections.abc import Sequence

MOST_NAMED = 20


def listed(names: Sequence[str]) -> str:
    """'a, b, c', where there are many the first of them."""
    more = f" and {len(names) - MOST_NAMED:,} more" if len(names) > MOST_NAMED else ""
    return ", ".join(f"{name:.60}" for name in names[:MOST_NAMED]) + more
