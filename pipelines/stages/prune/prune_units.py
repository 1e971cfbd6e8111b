"""Items of stage `prune` that remove heads, neurons and layers: their config, and how many units each layer loses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from compressor.errors import UserError
from compressor.models.modules import MODULES, STRUCTURES, Modules
from compressor.pruning_criteria import SUMS, Criterion, Structure, require_rows_used
from pipelines.engine.stage import CountOrShare
from pipelines.file import limits

if TYPE_CHECKING:
    from compressor.cost import LayerShape
    from compressor.models.anatomy import Layer

MODULES_OF = {name: span.scored for name, span in STRUCTURES.items()}
"""Modules whose |ΔW| scores a structure."""


class PruneItem(BaseModel):
    """Remove `remove` units from every layer, or from the whole model, those with the lowest scores first."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    structure: Structure = Field(description="weights: another kind of item, with a pattern")
    criterion: Criterion = Field(
        default="taylor",
        description="removed first: least needed by the loss (taylor, fisher) or by the hidden states, the rest refitted "
        "(reconstruction), least tuned (delta, the papers' score), smallest (weight)",
    )
    scope: Literal["layer", "global"] = Field(
        default="layer", description="the same count in every layer, or the lowest of the whole model (always so for layers)"
    )
    normalize: bool = Field(default=False, description="global: divide the scores of each layer by their norm first")
    remove: CountOrShare = Field(description="a count (per layer, or in all with scope global), or a share in (0, 1)")
    rows: int = Field(default=512, ge=1, le=limits.ROWS, description="training rows that taylor, fisher and reconstruction use")
    # without a default value, so that results of pipelines without this key keep their fingerprints
    modules: Modules | None = Field(
        default=None, description="delta, weight: the linear layers whose entries are summed, default all of the structure"
    )

    @property
    def everywhere(self) -> bool:
        """Whether the units of all layers are ranked together."""
        return self.scope == "global" or self.structure == "layers"

    @model_validator(mode="after")
    def _normalize_means_something(self) -> PruneItem:
        if self.normalize and self.structure == "layers":
            raise ValueError("normalize divides a layer's scores by their norm, and a whole layer has one score: leave it out")
        if self.normalize and self.scope == "layer":
            raise ValueError("normalize compares layers: it goes with scope: global")
        return self

    @model_validator(mode="after")
    def _modules_are_scored(self) -> PruneItem:
        if self.modules is None:
            return self
        if self.criterion not in SUMS:
            raise ValueError(f"modules is not used by criterion {self.criterion}: it goes with {', '.join(SUMS)}")
        scored = MODULES_OF.get(self.structure, MODULES)
        if odd := [name for name in self.modules if name not in scored]:
            raise ValueError(f"{odd[0]} is not scored for {self.structure}: name some of {', '.join(scored)}")
        return self

    @model_validator(mode="after")
    def _rows_are_used(self) -> PruneItem:
        require_rows_used(self.model_fields_set, [self.criterion])
        return self


def count_to_remove(remove: int | float, available: int, stay: int, units: str) -> int:
    """Number of units to remove of `available`, leaving `stay`: a share is rounded to the nearest, a half downwards.

    Raises UserError E501 when none would be removed, or too many.
    """
    if available <= stay:
        what = f"none of the {available} {units} can be removed: {stay} must stay"
        raise UserError("E501", what, "Leave out this item")
    # the share as written, as in `compressor.cost.share`
    count = math.ceil(Fraction(str(remove)) * available - Fraction(1, 2)) if isinstance(remove, float) else remove
    if count == 0:
        raise UserError(
            "E501", f"remove: {remove} is less than one of the {available} {units}", f"Use at least {1 / available:.2g}"
        )
    if count > available - stay:
        fix = f"Use at most {available - stay}"
        kept = max(available - count, 0) or "none"
        raise UserError("E501", f"remove: {remove} leaves {kept} of the {available} {units}", fix)
    return count


def least_units(item: PruneItem, layers: Sequence[Layer] | Sequence[LayerShape]) -> list[int]:
    """Number of units of an item's structure that each layer must keep."""
    return [int(layer.needed and item.structure in ("heads", "layers")) for layer in layers]


def counts_to_remove(item: PruneItem, units: Sequence[int], stay: Sequence[int]) -> list[int]:
    """Number of units to remove from each layer; spread evenly where all layers are ranked together. Raises UserError E501."""
    if not any(units):
        raise UserError("E501", f"there are no {item.structure} to remove", "Leave out this item")
    if not item.everywhere:
        of = f"{item.structure} of a layer"
        return [count_to_remove(item.remove, available, 1, of) if available else 0 for available in units]
    remaining, counts = count_to_remove(item.remove, sum(units), max(sum(stay), 1), item.structure), [0] * len(units)
    while remaining:
        layer = max(range(len(units)), key=lambda number: units[number] - stay[number] - counts[number])
        counts[layer], remaining = counts[layer] + 1, remaining - 1
    return counts
