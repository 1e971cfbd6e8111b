"""Texts as bytes: any text of Python is sent as UTF-8, or refused with a code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from compressor.errors import UserError

Text = str | tuple[str, ...]
"""A text, or a pair of texts, or a text with its choices."""
MOST_BYTES = 8 << 20
"""Of the texts of one request: half of what `compress serve` takes by default."""


def check_texts(texts: Sequence[Text], pairs: bool, model: str, first: int = 0) -> None:
    """Raises UserError E717 for what is no text, and for a pair where the model takes single texts, or the reverse. `first` is
    the number of the first text, from 0."""
    for number, text in enumerate(texts, first):
        parts = (text,) if isinstance(text, str) else text
        if not isinstance(parts, (tuple, list)) or not all(isinstance(part, str) for part in parts):
            raise UserError("E717", f"text {number + 1} is {text!r:.60}, not a text", "Give a str, or a tuple of them")
        if isinstance(text, str) is pairs or len(parts) != 1 + pairs:
            takes = "pairs of texts" if pairs else "single texts"
            got = "one" if isinstance(text, str) else "a pair" if len(parts) == 2 else f"a tuple of {len(parts)}"
            what = f"model '{model}' takes {takes}, text {number + 1} is {got}"
            raise UserError("E717", what, "Give --pair once for each text" if pairs else "Leave out --pair")


def encoded(texts: Sequence[Text], pairs: bool, model: str, first: int = 0) -> np.ndarray:
    """Texts as an array of bytes (texts, 1), or (texts, 2) for pairs. Raises UserError E717."""
    check_texts(texts, pairs, model, first)
    rows = [
        [as_utf8(part, number) for part in ((text,) if isinstance(text, str) else text)]
        for number, text in enumerate(texts, first)
    ]
    array = np.empty((len(rows), 1 + pairs), dtype=object)
    array[:] = rows or array
    return array


def batches(rows: np.ndarray, most: int) -> Iterator[np.ndarray]:
    """Rows of texts (texts, 1), or (texts, 2), in order, in parts of at most `most` rows and of MOST_BYTES, or of one row that
    has more by itself."""
    start = held = 0
    for number, row in enumerate(rows):
        size = sum(map(len, row))
        if number > start and (number - start == most or held + size > MOST_BYTES):
            yield rows[start:number]
            start, held = number, 0
        held += size
    if len(rows):
        yield rows[start:]


def as_utf8(text: str, number: int) -> bytes:
    """A text in UTF-8. Raises UserError E717 for a lone surrogate, half of a character.

    Python reads bytes of a command line that are not UTF-8 as such.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        what = f"text {number + 1} is not valid Unicode: character {error.start + 1} is {text[error.start]!a}"
        raise UserError("E717", what, "Give it in UTF-8, without halves of surrogate pairs") from error
