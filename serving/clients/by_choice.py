"""Multiple choice with a served model that scores pairs: a text with its choices in, the most likely choice out."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from compressor.errors import UserError
from serving.clients.text_bytes import Text

if TYPE_CHECKING:
    from compressor.tasks.kinds.choices import Choice

KIND = "choices"
PAIR = re.compile(r"text (\d+)(.*)", re.DOTALL)
"""A refusal that names a pair by its number."""


def best_choices(
    score: Callable[[Sequence[tuple[str, str]]], list[float]], texts: Sequence[Text], first: int = 0
) -> list[Choice]:
    """One Choice per row of `texts`, (text, choice, choice, ...), from the scores of all pairs. Raises UserError E717, with a
    number that counts from `first`."""
    from compressor.tasks.kinds.choices import chosen

    for number, text in enumerate(texts, first):
        if isinstance(text, str) or len(text) < 2:
            raise UserError(
                "E717", f"text {number + 1}, {text!r:.60}, has no choices", 'Give a JSON line with "text" and "choices"'
            )
    try:
        scores = iter(score([(text, choice) for text, *choices in texts for choice in choices]))
    except UserError as error:
        raise of_a_row(error, texts, first) from error
    return [chosen(choices, [next(scores) for _ in choices]) for _, *choices in texts]


def of_a_row(error: UserError, texts: Sequence[Text], first: int) -> UserError:
    """E717 with the number of a row in place of that of its pair among all; else the error itself."""
    named = PAIR.fullmatch(error.what)
    if error.code != "E717" or named is None:
        return error
    rows = [number for number, text in enumerate(texts, first) for _ in text[1:]]
    return UserError(error.code, f"text {rows[int(named[1]) - 1] + 1}{named[2]}", error.fix, error.where)
