"""The rows of one data file as every kind of task has them: texts, labels, and where each row stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Labels = Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | Sequence[str]
"""Of a split: one a row, or one a word of each row, or a text whose tokens a kind's `encode` makes labels of."""


@dataclass(frozen=True)
class Split:
    """One file: `texts[i]` has one string, or two for a pair, or a tuple of words; `labels[i]` indexes the task's label names,
    or is a number, a list of such indices, or a text; `lines[i]` is where the row stands."""

    texts: list[tuple[Any, ...]]
    labels: Labels
    lines: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.labels)
