"""Units that go from each layer after those of all layers were ranked together: whether enough are left, no plan can tell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from compressor.account import Plan, Trained
from compressor.errors import UserError
from compressor.methods import method
from compressor.models.modules import STRUCTURES, TILED
from compressor.pruning_criteria import NofM
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


def steps_of_item(item: UnitsItem, before: Mapping[str, int]) -> Mapping[str, int]:
    """`Plan.steps` after an item."""
    uneven = item.structure != "layers" and (item.everywhere or item.structure in before)
    return {**before, item.structure: 1} if uneven else before


def steps_of_search(structures: Iterable[str], plan: Plan, tile: int) -> Mapping[str, int]:
    """`Plan.steps` after a search in steps of `tile` columns: a layer keeps all its units, or a multiple of its step; of a
    structure that is uneven before, the plan knows neither."""
    from compressor.pruning.search import step_of

    even = [name for name in structures if name not in plan.steps]
    units = {name: [layer.units(name) for layer in plan.shape.layers if layer.units(name)] for name in even}
    steps = {name: [step_of(count, tile) for count in units[name]] if name in TILED else [1] for name in even}
    found = {name: math.gcd(*counts, *steps[name]) for name, counts in units.items()}
    return {**plan.steps, **dict.fromkeys(structures, 1), **found}


def check_pattern_fits(name: str, pattern: NofM, plan: Plan) -> None:
    """Raise UserError E505 where the inputs of the matrices `name` may be no multiple of a pattern's run in some layer."""
    structure = next((key for key in plan.steps if STRUCTURES[key].columns == name), None)
    if structure is None:
        return
    step = plan.steps[structure] * (plan.shape.layers[0].head_size if STRUCTURES[structure].in_attention else 1)
    if step % pattern.run:
        what = (
            f"only the run decides how many {structure} each layer keeps: the pattern {pattern.keep}:{pattern.run} may not fit"
        )
        raise UserError("E505", f"{what} the inputs of {name}", "Leave out this module, or remove them with scope: layer")


def check_sizes_alike(trained: Trained, plan: Plan) -> None:
    """Raise UserError E407 where a training needs blocks of one size, and only the run decides how many units each keeps."""
    alike = set(method(trained.method).sized_alike(trained.options))
    for structure in plan.steps:
        span = STRUCTURES[structure]
        if alike & {*span.rows, span.columns}:
            what = f"only the run decides how many {structure} each layer keeps: one prototype may not serve all of them"
            fix = f"Use share: false, shared: adapter or method: lora, or remove {structure} with scope: layer"
            raise UserError("E407", what, fix)


def _of_units(items: Iterable[UnitsItem]) -> Iterable[UnitsItem]:
    return (item for item in items if item.structure != "weights")


def _told(item: UnitsItem, who: str) -> Iterable[str]:
    if isinstance(item.remove, int) or item.structure not in TILED:  # a share of many neurons is neither none nor all of them
        what = f"only the run decides how many {item.structure} a layer keeps, and {who} removes {item.remove} of each"
        yield f"{what}: E501 where too few are left; scope: global there removes them where they are"
