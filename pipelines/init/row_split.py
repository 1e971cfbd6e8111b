"""`compress init --split`: setting rows apart to validate, so that what is left can be trained on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from compressor.errors import UserError
from compressor.tasks import GENERATED
from pipelines.init.cell_labels import LABELS_IN
from pipelines.init.data_files import DataTable
from pipelines.init.guesses import Guess

BALANCED = ("classification", "marked")
"""The kinds whose rows have one label each."""
TOGETHER = {"spans": (-1, "context"), **dict.fromkeys(GENERATED, (0, "prompt"))}
"""Kinds several of whose rows share a text: its place in `text`, and what it is called."""


def split_rows(table: DataTable, share: float, guessed: Guess) -> tuple[DataTable, DataTable]:
    """(training rows, validation rows): a random share, of each class where a row has one, the same every time.

    Every label keeps a training row. Rows of one prompt, or of one context, stay on one side: they would otherwise be validated
    with a text that was trained on. Raises UserError E130 if no row can be set apart.
    """
    place, noun = TOGETHER.get(guessed.kind, (None, "row"))
    units = _units(table.values(guessed.text[place]) if place is not None else range(len(table.rows)))
    labels_in = LABELS_IN.get(guessed.kind, lambda cell: set())
    labels = [labels_in(cell) for cell in table.values(guessed.label)]
    drawn = _drawn(units, share, labels if guessed.kind in BALANCED else None)
    chosen = _dispensable(drawn, labels)
    if not chosen:
        what = f"a share of {share:g} of {len(units)} {noun}s is no {noun}"
        if drawn:
            what = f"each of the {len(drawn)} {noun}s drawn has a label that no other has"
        raise UserError("E130", what, "Give a larger --split, or a --validation file", str(table.path))
    apart = sum(unit[0] in chosen for unit in drawn)
    why = f"{apart / len(units):.0%} of the {noun}s are set apart to validate"
    sides = ([number for number in range(len(table.rows)) if (number in chosen) == is_apart] for is_apart in (False, True))
    train, validation = (
        DataTable(table.path, [table.rows[number] for number in side], why, [table.lines[number] for number in side])
        for side in sides
    )
    return train, validation


def _units(texts: Sequence[Any]) -> list[list[int]]:
    """The numbers of the rows with equal texts."""
    units: dict[str, list[int]] = {}
    for number, text in enumerate(texts):
        units.setdefault(str(text).strip(), []).append(number)
    return list(units.values())


def _drawn(units: list[list[int]], share: float, classes: Sequence[set[str]] | None) -> list[list[int]]:
    """A random share of the units, of those of each class where there are `classes`; never all of one."""
    groups: dict[Any, list[list[int]]] = {}
    for unit in units:
        groups.setdefault(classes and frozenset(classes[unit[0]]), []).append(unit)
    draw = random.Random(0)
    counts = _apportioned(share, [len(members) for members in groups.values()])
    return [unit for members, count in zip(groups.values(), counts, strict=True) for unit in draw.sample(members, count)]


def _apportioned(share: float, sizes: Sequence[int]) -> list[int]:
    """Whole numbers near a share of each size, by largest remainders, so that their sum is that share of all: rounded each by
    itself, small classes would give far more or nothing. At least one of each is left."""
    exact = [share * size for size in sizes]
    counts = [min(int(part), size - 1) for part, size in zip(exact, sizes, strict=True)]
    able = [place for place, size in enumerate(sizes) if counts[place] < size - 1]
    able.sort(key=lambda place: exact[place] - counts[place], reverse=True)
    for place in able[: max(round(sum(exact)) - sum(counts), 0)]:
        counts[place] += 1
    return counts


def _dispensable(drawn: list[list[int]], labels: Sequence[set[str]]) -> set[int]:
    """The drawn rows but those with a label that no training row would have."""
    chosen = {number for unit in drawn for number in unit}
    trained = {label for number, row in enumerate(labels) if number not in chosen for label in row}
    for unit in drawn:
        needed = {label for number in unit for label in labels[number]}
        if not needed <= trained:
            trained |= needed
            chosen -= set(unit)
    return chosen
