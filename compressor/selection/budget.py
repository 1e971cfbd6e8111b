"""What a budget of positions that are chosen while training may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from compressor.cost import spendable
from compressor.errors import UserError

if TYPE_CHECKING:
    from compressor.models.anatomy import Matrix


def require_unmasked(matrices: Sequence[Matrix], budget: int) -> None:
    """Raise UserError E401 for a budget of no entry, or of more than those of `matrices` that no pruning mask hides."""
    total, free = (sum(sizes) for sizes in ([m.original.numel() for m in matrices], [m.unmasked for m in matrices]))
    spendable(budget, total)
    if budget > free:
        what = f"a budget of {budget:,} places, and all but {free:,} of {total:,} are pruned"
        raise UserError("E401", what, "Give a smaller budget, or other modules")
