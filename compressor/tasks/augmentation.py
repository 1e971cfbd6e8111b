"""Random variants of texts, on which a model can learn a teacher's outputs: no label is needed, so none must stay right.

A student that sees the same rows in every pass learns the teacher's outputs there by heart. On new texts, even senseless ones,
it learns the function (Beyer et al. 2022, arXiv 2106.05237; for texts Tang et al. 2019, arXiv 1903.12136).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence

from compressor.tasks.rows import Row, spaced

CHANGED = 0.2
"""Probability that a word is left out, or replaced."""

KEPT = (0.3, 0.8)
"""Share of the words that a part of a text has, at least and at most."""


def variants(
    rows: Sequence[Row], count: int, seed: int, known: Collection[Row] = (), alike: Callable[[Row], Row] = spaced
) -> Iterator[Row]:
    """`count` variants of every row, in `count` passes over the rows in random order. Rows for which `alike` gives the same are
    equal: those equal to an earlier one, or to one in `known`, are left out.

    In each, one text of the row is changed: it ends as another row's does, or is a part of itself, or lacks words, or has words
    of another row.
    """
    draw, seen = random.Random(seed), {alike(row) for row in (*known, *rows)}
    for _ in range(count):
        for row in draw.sample(rows, len(rows)):
            column = draw.randrange(len(row))
            change = draw.choice(CHANGES)
            text = change(row[column], draw.choice(rows)[column], draw)
            made = (*row[:column], text, *row[column + 1 :])
            if text.strip() and (read := alike(made)) not in seen:
                seen.add(read)
                yield made


def pieces(text: str) -> tuple[list[str], str]:
    """The words of a text, or its characters where spaces separate none (Chinese, say), and what joins them."""
    words = text.split()
    return (words, " ") if len(words) > 1 else (list(text.strip()), "")


def continued(text: str, other: str, draw: random.Random) -> str:
    """The beginning of a text, then the end of another."""
    (first, between), (second, _) = pieces(text), pieces(other)
    return between.join(first[: draw.randint(1, len(first))] + second[draw.randrange(len(second)) :])


def part(text: str, other: str, draw: random.Random) -> str:
    """Successive words of a text."""
    words, between = pieces(text)
    length = max(1, round(len(words) * draw.uniform(*KEPT)))
    start = draw.randint(0, len(words) - length)
    return between.join(words[start : start + length])


def shortened(text: str, other: str, draw: random.Random) -> str:
    """A text without some of its words."""
    words, between = pieces(text)
    return between.join(word for word in words if draw.random() >= CHANGED)


def mixed(text: str, other: str, draw: random.Random) -> str:
    """A text of which some words are replaced by those of another."""
    (words, between), (others, _) = pieces(text), pieces(other)
    return between.join(draw.choice(others) if draw.random() < CHANGED else word for word in words)


CHANGES = (continued, part, shortened, mixed)
