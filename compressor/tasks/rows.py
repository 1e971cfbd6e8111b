"""The rows of one data file in a common form for all kinds of tasks: texts, labels, and line numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compressor.errors import UserError

Row = tuple[Any, ...]
"""The texts of a row: one string, or two for a pair, more for choices, or a tuple of words."""

Labels = Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | Sequence[str]
"""Labels of a split: one per row, or one per word of each row, or a text whose tokens a kind's `encode` turns into labels."""


@dataclass(frozen=True)
class Split:
    """One file: `texts[i]` are those of a row; `labels[i]` indexes the task's label names, or is a number, a list of such
    indices, or a text; `lines[i]` is the row's line number."""

    texts: list[Row]
    labels: Labels
    lines: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, chosen: Iterable[int]) -> Split:
        """The rows of these numbers."""
        rows = list(chosen)
        return Split(*([column[row] for row in rows] for column in (self.texts, self.labels, self.lines)))


def spaced(texts: Row) -> Row:
    """The texts of a row with single spaces, to compare rows by: a cell may end in a space, a line of a .txt file does not."""
    return tuple(" ".join(text.split()) if isinstance(text, str) else text for text in texts)


def read_by(tokenizer: Any) -> Callable[[Row], Row]:
    """The function that gives the texts of a row as a fast tokenizer's normalizer writes them, `spaced`: rows that an uncased
    model reads alike are equal by it."""
    normalizer = tokenizer.backend_tokenizer.normalizer
    return spaced if normalizer is None else _Normalized(normalizer.__getstate__(), normalizer)


@dataclass(frozen=True)
class _Normalized:
    """The function of `read_by`. Those of equal normalizers are equal: `state` is what a normalizer is stored as."""

    state: bytes
    normalizer: Any = field(compare=False)

    def __call__(self, texts: Row) -> Row:
        # spaced before, too: some normalizers write spaces as other characters
        return spaced(self._normalized(spaced(texts)))

    def _normalized(self, text: Any) -> Any:
        return self.normalizer.normalize_str(text) if isinstance(text, str) else tuple(map(self._normalized, text))


def require_lengths(lengths: Sequence[int], most: int, split: Split, path: Path, what: str, advice: str) -> None:
    """Raise UserError E213 where a row has more than `most` tokens and none may be cut off; `what` is the word for rows."""
    if long := [row for row, length in enumerate(lengths) if length > most]:
        found = f"{len(long)} of {len(lengths)} {what} are longer than max_length {most}, the longest {max(lengths)} tokens"
        fix = f"Set task.max_length to {max(lengths)} where the model has so many positions, or {advice}"
        raise UserError("E213", found, fix, f"{path}:{split.lines[long[0]]}")
