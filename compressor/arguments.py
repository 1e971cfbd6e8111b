"""Checks of what a program gives to the library: ValueError in place of a wrong result or an error from deep inside."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from numbers import Real

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
"""Names of pipelines, stages, tasks and served models: safe as a file's name everywhere."""
NAME_FIX = "Use letters a to z, digits, '_', '-' and '.', a letter or digit first"


def require_one_of(what: str, value: object, words: Iterable[object]) -> None:
    """Raises ValueError for a value that is none of the `words`."""
    words = tuple(words)
    if value not in words:
        raise ValueError(f"{what} is {value!r}: one of {', '.join(map(str, words))}")


def require_all_of(what: str, values: Sequence[str], words: Iterable[str]) -> None:
    """Raises ValueError for no values, a bare str, or a value that is none of the `words`."""
    words = tuple(words)
    if isinstance(values, str) or not values:
        raise ValueError(f"{what} is {values!r}: give a list of {', '.join(words)}")
    for value in values:
        require_one_of(what, value, words)


def require_whole(what: str, value: object, least: int = 1) -> None:
    """Raises ValueError for what is no whole number of at least `least`."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < least:
        raise ValueError(f"{what} is {value!r}: a whole number of {least} or more")


def require_number(what: str, value: object, least: float, most: float = math.inf, *, above: bool = False) -> None:
    """Raises ValueError for what is no finite number from `least` (or, with `above`, above it) to `most`."""
    number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not (number and value <= most and (value > least if above else value >= least)):
        bound = "" if math.isinf(most) else f" to {most}"
        raise ValueError(f"{what} is {value!r}: a number {'above' if above else 'from'} {least}{bound}")
