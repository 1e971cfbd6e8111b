"""The rows of one data file in a common form for all kinds of tasks: texts, labels, and line numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Labels = Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | Sequence[str]
"""Labels of a split: one per row, or one per word of each row, or a text whose tokens a kind's `encode` turns into labels."""


@dataclass(frozen=True)
class Split:
    """One file: `texts[i]` has one string, or two for a pair, or a tuple of words; `labels[i]` indexes the task's label names,
    or is a number, a list of such indices, or a text; `lines[i]` is the row's line number."""

    texts: list[tuple[Any, ...]]
    labels: Labels
    lines: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.labels)
