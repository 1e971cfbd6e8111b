"""Units that go from each layer after those of all layers were ranked together: whether enough are left, no plan can tell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from pipelines.engine.stage import Entry


class UnitsItem(Protocol):
    """What is read of an item that removes units; `everywhere`: those of all layers are ranked together."""

    structure: str
    remove: int | float
    everywhere: bool


def uneven_warnings(items: Iterable[UnitsItem], searched: Iterable[str], later: Sequence[Entry]) -> Iterable[str]:
    """Items of a stage, or of `later` ones, that end a run with E501 where a layer has too few units left: of a structure that
    an item before them ranks over all layers, or a search may remove (`searched`), only the run decides what a layer keeps."""
    uneven = set(searched)
    for item in _of_units(items):
        if item.everywhere:
            uneven.add(item.structure)
        elif item.structure in uneven:
            yield from _told(item, "a later item")
    for entry in (entry for entry in later if entry.row.removes):
        for item in _of_units(entry.config.items):
            if item.structure in uneven and not item.everywhere:
                yield from _told(item, f"'{entry.id}'")


def _of_units(items: Iterable[UnitsItem]) -> Iterable[UnitsItem]:
    return (item for item in items if item.structure != "weights")


def _told(item: UnitsItem, who: str) -> Iterable[str]:
    if isinstance(item.remove, int) or item.structure != "neurons":  # a share of many neurons is neither none nor all of them
        what = f"only the run decides how many {item.structure} a layer keeps, and {who} removes {item.remove} of each"
        yield f"{what}: E501 where too few are left; scope: global there removes them where they are"
