"""Multiple choice with a served model that scores pairs: a text with its choices in, the most likely choice out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from compressor.errors import UserError
from serving.clients.text_bytes import Text

if TYPE_CHECKING:
    from compressor.tasks.kinds.choices import Choice

KIND = "choices"


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
    scores = iter(score([(text, choice) for text, *choices in texts for choice in choices]))
    return [chosen(choices, [next(scores) for _ in choices]) for _, *choices in texts]
